"""All methods by name, and the configuration class that knows them."""

from __future__ import annotations

from algorithms.adaptive_fedavg import AdaptiveFedAvg
from algorithms.adcol import ADCOL
from algorithms.apfl import APFL
from algorithms.apple import APPLE
from algorithms.base import Algorithm
from algorithms.ccvr import CCVR
from algorithms.centralized import Centralized
from algorithms.cfl import CFL
from algorithms.contract import check_method
from algorithms.creff import CReFF
from algorithms.dfedavgm import DFedAvgM
from algorithms.dfedsam import DFedSAM
from algorithms.dispfl import DisPFL
from algorithms.ditto import Ditto
from algorithms.drfa import DRFA
from algorithms.elastic import Elastic
from algorithms.fedacg import FedACG
from algorithms.fedadmm import FedADMM
from algorithms.fedah import FedAH
from algorithms.fedala import FedALA
from algorithms.fedalt import FedALT
from algorithms.fedamp import FedAMP
from algorithms.fedap import FedAP
from algorithms.fedapen import FedAPEN
from algorithms.fedas import FedAS
from algorithms.fedasync import FedAsync
from algorithms.fedavg import FedAvg
from algorithms.fedawa import FedAWA
from algorithms.fedaws import FedAwS
from algorithms.fedbabu import FedBABU
from algorithms.fedbn import FedBN
from algorithms.fedbuff import FedBuff
from algorithms.fedcac import FedCAC
from algorithms.fedcm import FedCM
from algorithms.fedcp import FedCP
from algorithms.fedcr import FedCR
from algorithms.fedcross import FedCross
from algorithms.fedcurv import FedCurv
from algorithms.feddbe import FedDBE
from algorithms.feddc import FedDC
from algorithms.feddecorr import FedDecorr
from algorithms.feddf import FedDF
from algorithms.feddisco import FedDisco
from algorithms.feddistill import FedDistill
from algorithms.feddpa import FedDPA
from algorithms.feddrift import FedDrift
from algorithms.feddwa import FedDWA
from algorithms.feddyn import FedDyn
from algorithms.fedem import FedEM
from algorithms.fedema import FedEMA
from algorithms.federaser import FedEraser
from algorithms.fedetf import FedETF
from algorithms.fedewc import FedEWC
from algorithms.fedex_lora import FedExLoRA
from algorithms.fedexp import FedExP
from algorithms.fedfed import FedFed
from algorithms.fedfomo import FedFomo
from algorithms.fedfusion import FedFusion
from algorithms.fedgc import FedGC
from algorithms.fedgen import FedGen
from algorithms.fedgh import FedGH
from algorithms.fedgkd import FedGKD
from algorithms.fedheal import FedHEAL
from algorithms.fedhkd import FedHKD
from algorithms.fediir import FedIIR
from algorithms.fedinit import FedInit
from algorithms.fedkd import FedKD
from algorithms.fedlaw import FedLAW
from algorithms.fedlc import FedLC
from algorithms.fedlesam import FedLESAM
from algorithms.fedloge import FedLoGe
from algorithms.fedmd import FedMD
from algorithms.fedme import FedMe
from algorithms.fedmgda import FedMGDA
from algorithms.fedmmd import FedMMD
from algorithms.fedmrl import FedMRL
from algorithms.fedmtl import FedMTL
from algorithms.fednar import FedNAR
from algorithms.fednh import FedNH
from algorithms.fednoro import FedNoRo
from algorithms.fednova import FedNova
from algorithms.fedntd import FedNTD
from algorithms.fedopt import FedAdagrad, FedAdam, FedAvgM, FedYogi
from algorithms.fedotp import FedOTP
from algorithms.fedpac import FedPAC
from algorithms.fedpcl import FedPCL
from algorithms.fedper import FedPer
from algorithms.fedpgp import FedPGP
from algorithms.fedphp import FedPHP
from algorithms.fedproto import FedProto
from algorithms.fedprox import FedProx
from algorithms.fedpub import FedPub
from algorithms.fedrap import FedRAP
from algorithms.fedrcl import FedRCL
from algorithms.fedrecon import FedRecon
from algorithms.fedrep import FedRep
from algorithms.fedrod import FedRoD
from algorithms.fedrolex import FedRolex
from algorithms.fedrs import FedRS
from algorithms.fedsam import FedSAM
from algorithms.fedselect import FedSelect
from algorithms.fedsmoo import FedSMOO
from algorithms.fedsol import FedSOL
from algorithms.fedspeed import FedSpeed
from algorithms.fedsr import FedSR
from algorithms.fedtgp import FedTGP
from algorithms.fedthe import FedTHE
from algorithms.fedtpg import FedTPG
from algorithms.fedu import FedU
from algorithms.feduv import FedUV
from algorithms.fedvarp import FedVARP
from algorithms.fesem import FeSEM
from algorithms.fixmatch import FixMatch
from algorithms.fjord import FjORD
from algorithms.flash import Flash
from algorithms.flda import FLDA
from algorithms.flexlora import FlexLoRA
from algorithms.floco import Floco
from algorithms.floco_plus import FlocoPlus
from algorithms.flora import FLoRA
from algorithms.fltrust import FLTrust
from algorithms.flute import FLUTE
from algorithms.flwf import FLwF
from algorithms.fml import FML
from algorithms.fpl import FPL
from algorithms.gcfl import GCFL
from algorithms.gpfedrec import GPFedRec
from algorithms.gpfl import GPFL
from algorithms.heterofl import HeteroFL
from algorithms.hetlora import HetLoRA
from algorithms.hierfavg import HierFAVG
from algorithms.hypcluster import HypCluster
from algorithms.knn_per import KnnPer
from algorithms.l2gd import L2GD
from algorithms.lg_fedavg import LGFedAvg
from algorithms.local import Local
from algorithms.lora_fair import LoRAFair
from algorithms.lotteryfl import LotteryFL
from algorithms.mapper import Mapper
from algorithms.metafed import MetaFed
from algorithms.mime import Mime, MimeLite
from algorithms.moon import MOON
from algorithms.pacfl import PACFL
from algorithms.pefll import PeFLL
from algorithms.per_fedavg import PerFedAvg
from algorithms.perada import PerAda
from algorithms.pfedbayes import PFedBayes
from algorithms.pfedfda import PFedFDA
from algorithms.pfedgraph import PFedGraph
from algorithms.pfedhn import PFedHN
from algorithms.pfedla import PFedLA
from algorithms.pfedme import PFedMe
from algorithms.pfedmoap import PFedMoAP
from algorithms.pfedpara import PFedPara
from algorithms.pfedsim import PFedSim
from algorithms.pfl_da import PFLDA
from algorithms.qfedavg import QFedAvg
from algorithms.rolora import RoLoRA
from algorithms.scaffnew import Scaffnew
from algorithms.scaffold import Scaffold
from algorithms.semifl import SemiFL
from algorithms.subfedavg import SubFedAvg
from algorithms.superfed import SuPerFed
from algorithms.term import TERM
from algorithms.turbosvm import TurboSVM
from rayfl.config.schema import experiment_schema

METHODS: dict[str, type[Algorithm]] = {
    method.model_fields["name"].default: method
    for method in (
        FedAvg,
        FedProx,
        FedBN,
        FedAvgM,
        FedAdagrad,
        FedYogi,
        FedAdam,
        Flash,
        FedExP,
        AdaptiveFedAvg,
        Elastic,
        FedNova,
        QFedAvg,
        TERM,
        DRFA,
        FedBuff,
        FedAsync,
        FedNTD,
        FedLC,
        FedRS,
        FedDecorr,
        FedUV,
        FedRCL,
        FedSR,
        FedIIR,
        FedDisco,
        FedAWA,
        FedLAW,
        TurboSVM,
        FedSAM,
        FedSOL,
        FedLESAM,
        FedCM,
        FedACG,
        FedInit,
        FedNAR,
        Mime,
        MimeLite,
        Scaffnew,
        FedVARP,
        FedEraser,
        FedCross,
        FedU,
        FedEMA,
        CCVR,
        CReFF,
        FedGH,
        FedGen,
        FedFed,
        FedDistill,
        FedHKD,
        FedDF,
        FedMD,
        FedKD,
        KnnPer,
        FedCAC,
        FedSelect,
        CFL,
        Scaffold,
        SuPerFed,
        Floco,
        FlocoPlus,
        FedPer,
        PFedPara,
        LGFedAvg,
        PFLDA,
        FedRep,
        FedRecon,
        FedBABU,
        FedETF,
        FedNH,
        FedAwS,
        FedPAC,
        FedGC,
        FedRoD,
        FedLoGe,
        FedTHE,
        PFedFDA,
        FedDBE,
        FedALA,
        FedAH,
        FedAS,
        FLUTE,
        FedCP,
        FedCR,
        GCFL,
        GPFL,
        FedProto,
        FedPub,
        FedRAP,
        GPFedRec,
        FedTGP,
        FedPCL,
        ADCOL,
        MetaFed,
        MOON,
        PFedSim,
        FedAP,
        FedAMP,
        FedDWA,
        PFedGraph,
        FedFomo,
        APPLE,
        HypCluster,
        PACFL,
        FeSEM,
        FedDrift,
        HierFAVG,
        FedEM,
        Ditto,
        PerAda,
        FedMTL,
        FedDyn,
        FedDC,
        FedADMM,
        FedSpeed,
        FedSMOO,
        FedMe,
        FedPHP,
        FML,
        FedAPEN,
        FedMRL,
        FedMMD,
        FedFusion,
        FLDA,
        APFL,
        PFedHN,
        PFedLA,
        PeFLL,
        PFedMe,
        PFedBayes,
        PerFedAvg,
        Mapper,
        L2GD,
        FedDPA,
        FedALT,
        FedPGP,
        FedOTP,
        PFedMoAP,
        FedTPG,
        HetLoRA,
        FLoRA,
        FLTrust,
        FedMGDA,
        FedHEAL,
        FedNoRo,
        FixMatch,
        SemiFL,
        SubFedAvg,
        LotteryFL,
        FPL,
        FedGKD,
        FedEWC,
        FedCurv,
        FLwF,
        FlexLoRA,
        FedExLoRA,
        RoLoRA,
        LoRAFair,
        HeteroFL,
        FedRolex,
        FjORD,
        DFedAvgM,
        DFedSAM,
        DisPFL,
        Local,
        Centralized,
    )
}
"""Method classes by the name used in configurations."""

Experiment = experiment_schema(list(METHODS.values()), Algorithm, check_method)
"""The configuration class of experiments with any of these methods."""

Experiment.__module__ = __name__  # where pickle finds it
