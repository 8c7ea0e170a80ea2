"""Matrix optimizers for JAX: composable Optax transforms that chain into Muon, SOAP and KL-SOAP."""

from emopt_jax import diagnostics as diagnostics
from emopt_jax.linalg.coefficients import AOL as AOL
from emopt_jax.linalg.coefficients import CANS as CANS
from emopt_jax.linalg.coefficients import CUBIC5 as CUBIC5
from emopt_jax.linalg.coefficients import DEEPSEEK_V4 as DEEPSEEK_V4
from emopt_jax.linalg.coefficients import KELLER_JORDAN as KELLER_JORDAN
from emopt_jax.linalg.coefficients import POLAR_EXPRESS as POLAR_EXPRESS
from emopt_jax.linalg.coefficients import QUINTIC as QUINTIC
from emopt_jax.linalg.coefficients import Coefficients as Coefficients
from emopt_jax.linalg.eigenbasis import Eigenbases as Eigenbases
from emopt_jax.linalg.eigenbasis import Eigenbasis as Eigenbasis
from emopt_jax.linalg.eigenbasis import qr_refresh as qr_refresh
from emopt_jax.linalg.eigenbasis import sort_by_magnitude as sort_by_magnitude
from emopt_jax.linalg.eigenbasis import sort_descending as sort_descending
from emopt_jax.linalg.exact_refresh import eigh_at_start as eigh_at_start
from emopt_jax.linalg.exact_refresh import eigh_refresh as eigh_refresh
from emopt_jax.linalg.factors import Factors as Factors
from emopt_jax.linalg.gated import gated as gated
from emopt_jax.linalg.polar import newton_schulz as newton_schulz
from emopt_jax.linalg.polar import polar_svd as polar_svd
from emopt_jax.linalg.product_refresh import jacobi_refresh as jacobi_refresh
from emopt_jax.matrices import MatrixAxes as MatrixAxes
from emopt_jax.matrices import leaf_path as leaf_path
from emopt_jax.optimizers.muon import mop as mop
from emopt_jax.optimizers.muon import muon as muon
from emopt_jax.optimizers.muon import paper_muon as paper_muon
from emopt_jax.optimizers.shampoo import kl_shampoo as kl_shampoo
from emopt_jax.optimizers.shampoo import shampoo as shampoo
from emopt_jax.optimizers.soap import kl_soap as kl_soap
from emopt_jax.optimizers.soap import paper_kl_soap as paper_kl_soap
from emopt_jax.optimizers.soap import scale_by_soap as scale_by_soap
from emopt_jax.optimizers.soap import soap as soap
from emopt_jax.routing import default_is_matrix as default_is_matrix
from emopt_jax.routing import route as route
from emopt_jax.routing_table import RoutingTable as RoutingTable
from emopt_jax.routing_table import describe_routing as describe_routing
from emopt_jax.schedules import expert_batch_size as expert_batch_size
from emopt_jax.schedules import scale_learning_rate as scale_learning_rate
from emopt_jax.schedules import wsd_schedule as wsd_schedule
from emopt_jax.transforms.adam_bound import clip_to_adam_bound as clip_to_adam_bound
from emopt_jax.transforms.clip_by_finite_norm import clip_by_finite_norm as clip_by_finite_norm
from emopt_jax.transforms.covariance import CovarianceState as CovarianceState
from emopt_jax.transforms.covariance import bias_corrected as bias_corrected
from emopt_jax.transforms.covariance import kl_covariance as kl_covariance
from emopt_jax.transforms.covariance import kronecker_covariance as kronecker_covariance
from emopt_jax.transforms.covariance_start import frobenius_start as frobenius_start
from emopt_jax.transforms.covariance_start import rms_start as rms_start
from emopt_jax.transforms.covariance_start import zero_start as zero_start
from emopt_jax.transforms.eigenbasis_rotate import EigenbasisRotateState as EigenbasisRotateState
from emopt_jax.transforms.eigenbasis_rotate import eigenbasis_rotate as eigenbasis_rotate
from emopt_jax.transforms.kronecker_precondition import (
  KroneckerPreconditionState as KroneckerPreconditionState,
)
from emopt_jax.transforms.kronecker_precondition import kronecker_precondition as kronecker_precondition
from emopt_jax.transforms.momentum import MomentumState as MomentumState
from emopt_jax.transforms.momentum import momentum as momentum
from emopt_jax.transforms.orthogonalize import orthogonalize as orthogonalize
from emopt_jax.transforms.rms_match import adam_rms as adam_rms
from emopt_jax.transforms.rms_match import rms_match as rms_match
from emopt_jax.transforms.rms_match import rms_normalize as rms_normalize
from emopt_jax.transforms.rms_match import shape as shape
from emopt_jax.transforms.rms_match import spectral as spectral
from emopt_jax.transforms.rms_match import unit_rms as unit_rms
from emopt_jax.transforms.skip_spikes import SkipSpikesState as SkipSpikesState
from emopt_jax.transforms.skip_spikes import skip_spikes as skip_spikes

__version__ = '0.1.0'
