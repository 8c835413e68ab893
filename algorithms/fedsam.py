"""FedSAM: local steps of sharpness-aware minimization."""

from __future__ import annotations

from typing import ClassVar, Literal

from algorithms.fedavg import FineTuned
from algorithms.parts.sharpness import Sharpness


class FedSAM(Sharpness, FineTuned):
    """FedSAM: federated averaging whose local steps take the gradient where the loss nearby is high.

    A local step on a mini-batch, whose mean loss is f, follows the gradient at a point at distance rho uphill:

        g = grad f(w),    e = rho g / ||g||,    w <- w - eta grad f(w + e)

    The norm is that of all parameters as one vector, and e is a constant: no second derivative is taken. Both passes
    have the same samples, with the same augmentation and the same masks of dropout. With ``adaptive`` it is FedASAM, in
    which the distance is measured in units of the weights:

        e = rho T^2 g / ||T g||,    T = |w| + eta_T for weights,  1 for biases

    Momentum, weight decay, clipping and the other optimizers are applied to the second gradient as they are to the only
    one of federated averaging; none of them enters e. A step costs two passes. Running statistics are recorded by the
    first pass alone, at w. Where g is 0, e is 0.

    Server: model w. Client: nothing. Down: w. Up: w_k and n_k. With ``finetune_epochs`` each client fine-tunes the
    final model by plain steps.

    References:
        Qu, Li, Duan, Liu, Tang, Lu: Generalized Federated Learning via Sharpness Aware Minimization, ICML 2022, FedSAM.
        Caldarola, Caputo, Ciccone: Improving Generalization in Federated Learning by Seeking Flat Minima, ECCV 2022,
        FedSAM and FedASAM.
    """

    name: Literal["fedsam"] = "fedsam"
    citation: ClassVar[str] = "Qu et al., ICML 2022"
