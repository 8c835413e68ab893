"""Metrics as sums that can be added across batches and clients, and their summary over clients.

A pooled metric is that of the sum of the clients' statistics; the calibration error of a union of clients is not
the mean of theirs, so both are worth recording.
"""

from rayfl.metrics.classification import CLASSIFICATION as CLASSIFICATION
from rayfl.metrics.classification import NUM_BINS as NUM_BINS
from rayfl.metrics.classification import STATISTICS_SIZE as STATISTICS_SIZE
from rayfl.metrics.classification import batch_statistics as batch_statistics
from rayfl.metrics.classification import metric_values as metric_values
from rayfl.metrics.classification import outcomes as outcomes
from rayfl.metrics.classification import summed as summed
from rayfl.metrics.measures import Measures as Measures
from rayfl.metrics.measures import MeasuresBySample as MeasuresBySample
from rayfl.metrics.measures import Metric as Metric
from rayfl.metrics.overview import ClientSummary as ClientSummary
from rayfl.metrics.overview import comparable as comparable
from rayfl.metrics.overview import first_best as first_best
from rayfl.metrics.overview import summarize as summarize
from rayfl.metrics.statistics import Statistics as Statistics
