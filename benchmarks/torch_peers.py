"""PyTorch's optimizers with the settings of their JAX counterparts, for `bench_step.py`; none where torch is missing.

python benchmarks/bench_step.py --only optax.contrib.muon torch.optim.AdamW 'torch.optim.Muon (bfloat16)'
"""

import importlib.metadata
import importlib.util
import os
from typing import Any

import jax
import numpy as np

# Threads of OpenMP that wait busily take the cores of whatever else runs: two of them made torch's step 100 times as
# long on a machine with two cores in use. Read when torch is loaded.
os.environ.setdefault('OMP_WAIT_POLICY', 'passive')

# torch.optim.Muon multiplies in bfloat16 always, and has one triple of coefficients for its five steps.
NAMES = ('torch.optim.AdamW', 'torch.optim.Muon (bfloat16)', 'pytorch_optimizer.SOAP')


def installed(package: str) -> bool:
  return importlib.util.find_spec(package) is not None


def versions() -> str:
  """Returns what the header adds to its own versions, '' without torch."""
  packages = [package for package in ('torch', 'pytorch_optimizer') if installed('torch') and installed(package)]
  return ''.join(f', {package} {importlib.metadata.version(package)}' for package in packages)


def make_optimizers(parameters: dict[str, jax.Array], gradients: dict[str, jax.Array]) -> dict[str, Any]:
  """Returns optimizers that each own a copy of the parameters with the gradients, on the device that JAX uses."""
  if not installed('torch'):
    return {}
  import torch

  on_gpu = jax.default_backend() == 'gpu'
  if on_gpu and not torch.cuda.is_available():
    return {}  # this torch has no GPU, and on a CPU it would meet another machine than the rest

  def copies():
    return [_tensor(p, _tensor(gradients[name], None, on_gpu), on_gpu) for name, p in parameters.items()]

  # Fused is its fastest form.
  made = {'torch.optim.AdamW': torch.optim.AdamW(copies(), lr=0.01, weight_decay=1e-4, fused=True)}
  if hasattr(torch.optim, 'Muon'):  # since torch 2.9
    settings = {'momentum': 0.95, 'nesterov': True, 'ns_steps': 5, 'adjust_lr_fn': 'match_rms_adamw'}
    made['torch.optim.Muon (bfloat16)'] = torch.optim.Muon(copies(), lr=0.01, weight_decay=0.1, **settings)
  if installed('pytorch_optimizer'):
    from pytorch_optimizer import SOAP

    # The decays of `soap`, and new bases by QR in every step as there; but its own eps, since a smaller one lets it
    # divide rounding noise by rounding noise.
    settings = {'betas': (0.9, 0.95), 'shampoo_beta': 0.95, 'precondition_frequency': 1}
    made['pytorch_optimizer.SOAP'] = SOAP(copies(), lr=0.01, weight_decay=0.1, **settings)
  return made


def step(optimizer: Any) -> None:
  """Does one step and waits for its end."""
  import torch

  optimizer.step()
  if jax.default_backend() == 'gpu':
    torch.cuda.synchronize()


def state_bytes(optimizer: Any) -> int:
  """Returns the bytes of all tensors in the state, which exists after the first step."""
  import torch

  leaves = jax.tree.leaves(list(optimizer.state.values()))
  return sum(leaf.nbytes for leaf in leaves if isinstance(leaf, torch.Tensor))


def _tensor(array: jax.Array, gradient: Any, on_gpu: bool):
  import torch

  tensor = torch.from_numpy(np.array(array)).to('cuda' if on_gpu else 'cpu')
  tensor.grad = gradient
  return tensor
