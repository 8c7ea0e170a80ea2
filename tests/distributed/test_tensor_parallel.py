"""Tensor-parallel Newton-Schulz: equal to the whole matrix's, with the collectives it promises."""

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

import emopt_jax
from emopt_jax import newton_schulz
from emopt_jax.distributed.tensor_parallel import duplicated, gram, per_step
from tests.references import oracles

refined = functools.partial(gram, refinements=1)
METHODS = {'duplicated': duplicated, 'gram': gram, 'per_step': per_step}
TABLES = {
  'keller_jordan': emopt_jax.KELLER_JORDAN,
  'quintic': emopt_jax.QUINTIC,
  'polar_express': emopt_jax.POLAR_EXPRESS,
  'deepseek_v4': emopt_jax.DEEPSEEK_V4,
  'cubic5': emopt_jax.CUBIC5,
  'cans': emopt_jax.CANS,
  'aol': emopt_jax.AOL,
}
RANKS = 4


def normal(shape, seed=0):
  return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def conditioned(shape, values):
  """A matrix with the given singular values."""
  u, _, vt = np.linalg.svd(normal(shape), full_matrices=False)
  return ((u * values) @ vt).astype(np.float32)


def whole(x, table=emopt_jax.POLAR_EXPRESS):
  """newton_schulz of the whole matrices, in float64 where there is an oracle."""
  if table.rescales_rows:
    return np.asarray(newton_schulz(x, coefficients=table))
  results = [oracles.newton_schulz(matrix, table.rows) for matrix in x.reshape(-1, *x.shape[-2:])]
  return np.float32(results).reshape(x.shape)


def auto_mesh():
  return Mesh(np.array(jax.devices()[:RANKS]), ('model',))


def explicit_mesh():
  return jax.make_mesh((RANKS,), ('model',), devices=jax.devices()[:RANKS])


def sharded(method, x, dim=-1, mesh=None, check_vma=True, **options):
  """The jitted function of the whole matrix, and the matrix sharded for it."""
  mesh = mesh or auto_mesh()
  entries = [None] * np.ndim(x)
  entries[dim] = 'model'
  spec = jax.P(*entries)

  def run(x):
    y = method(x, 'model', dim=dim, **options)
    assert (y.shape, y.dtype) == (x.shape, x.dtype)
    assert jax.typeof(y).mat.varying == ({'model'} if check_vma else set())
    return y

  run = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=check_vma))
  return run, jax.device_put(x, jax.NamedSharding(mesh, spec))


def apply(method, x, *args, **options):
  run, x = sharded(method, x, *args, **options)
  return np.asarray(run(x))


def relative_error(y, expected):
  return np.linalg.norm(y - expected) / np.linalg.norm(expected)


# Sharded sides that are longer, equal and shorter. A square random matrix has singular values near 0, and where the
# sharded side is the shorter one `gram` factors a singular matrix: rounding of 1e-7 under a square root is 3e-4 |X|_F,
# and Polar Express brings a part of that to 1.
@pytest.mark.parametrize(
  'shape, dim, loose',
  [((8, 32), -1, 1e-5), ((3, 24, 6), -2, 1e-5), ((1, 64), -1, 1e-5), ((16, 16), -1, 1e-3), ((8, 32), -2, 1e-3)],
)
@pytest.mark.parametrize('method', METHODS.values(), ids=METHODS)
def test_equals_the_whole_matrix(method, shape, dim, loose):
  x = normal(shape)
  # Sums in another order, which the first rows amplify in the small singular directions.
  assert relative_error(apply(method, x, dim), whole(x)) < (loose if method is gram else 1e-5)


@pytest.mark.parametrize('name', TABLES)
@pytest.mark.parametrize('method', [gram, per_step])
def test_every_table(method, name):
  x, table = normal((8, 32)), TABLES[name]
  # As above; CANS is the steepest of the tables.
  chex.assert_trees_all_close(apply(method, x, coefficients=table), whole(x, table), atol=2e-5)


@pytest.mark.parametrize('method', [gram, per_step])
def test_one_step(method):
  x = normal((8, 32))
  chex.assert_trees_all_close(apply(method, x, steps=1), np.asarray(newton_schulz(x, steps=1)), atol=1e-6)


@pytest.mark.parametrize('make_mesh', [auto_mesh, explicit_mesh])
@pytest.mark.parametrize('check_vma', [True, False])
@pytest.mark.parametrize('method', METHODS.values(), ids=METHODS)
def test_meshes_and_varying_types(method, check_vma, make_mesh):
  x = normal((2, 8, 32))
  y = apply(method, x, mesh=make_mesh(), check_vma=check_vma)
  chex.assert_trees_all_close(y, whole(x), atol=1e-5)


@pytest.mark.parametrize('method', METHODS.values(), ids=METHODS)
def test_other_mesh_axes_stay_apart(method):
  mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ('data', 'model'))
  x = normal((2, 8, 32))
  spec = jax.P('data', None, 'model')
  run = jax.jit(jax.shard_map(lambda x: method(x, 'model'), mesh=mesh, in_specs=spec, out_specs=spec))
  chex.assert_trees_all_close(np.asarray(run(x)), whole(x), atol=1e-5)


@pytest.mark.parametrize('method', METHODS.values(), ids=METHODS)
def test_a_replicated_shard_counts_once_a_rank(method):
  x = normal((3, 8))
  run = functools.partial(jax.shard_map, mesh=auto_mesh(), in_specs=(), out_specs=jax.P(None, 'model'))
  run = jax.jit(run(lambda: method(jnp.asarray(x), 'model')))
  chex.assert_trees_all_close(np.asarray(run()), whole(np.tile(x, (1, RANKS))), atol=1e-5)


@pytest.mark.parametrize('name', ['quintic', 'polar_express'])
def test_gram_accuracy_by_condition(name):
  """The regime that the docstring states; a second Gram matrix, of a nearly orthogonal Q, is well conditioned."""
  run, _ = sharded(gram, normal((16, 64)), coefficients=TABLES[name])
  run_refined, _ = sharded(refined, normal((16, 64)), coefficients=TABLES[name])
  for condition, bound in ((1, 1e-5), (10, 1e-5), (30, 1e-5), (100, 1e-4)):
    x = conditioned((16, 64), np.geomspace(1, 1 / condition, 16))
    assert relative_error(np.asarray(run(x)), whole(x, TABLES[name])) < bound
    assert relative_error(np.asarray(run_refined(x)), whole(x, TABLES[name])) < 1e-5


@pytest.mark.parametrize('method', [gram, refined, per_step])
def test_rank_deficient(method):
  run, _ = sharded(method, normal((32, 128)))
  # 40 steps bring noise up to 1 but never further: a recurrence of Gram matrices would leave float32 here.
  run_long, _ = sharded(method, normal((32, 128)), steps=40)
  for rank in (1, 3):
    x = conditioned((32, 128), np.arange(32) < rank)
    # As for newton_schulz: noise of 1e-7 |X| in null directions, amplified by 8 rows.
    chex.assert_trees_all_close(np.asarray(run(x)), oracles.polar(x), atol=1e-2)
    assert np.linalg.norm(run_long(x), 2) < 1.01
  x = conditioned((32, 128), np.geomspace(1, 1e-7, 32))
  u, s, vt = np.linalg.svd(x, full_matrices=False)
  y = np.asarray(run_long(x))
  assert np.linalg.norm(y, 2) < 1.01
  # Singular directions above 1e-2 of the largest come out with singular value 1.
  chex.assert_trees_all_close(np.diag(u.T @ y @ vt.T)[s > 1e-2], np.ones((s > 1e-2).sum(), np.float32), atol=1e-3)


@pytest.mark.parametrize('method', METHODS.values(), ids=METHODS)
def test_scales_and_zeros_of_each_matrix(method):
  scales = np.array([1e-30, 1e-10, 1.0, 1e10, 1e30, 0.0, np.nan], np.float32)
  x = normal((8, 32))
  # A rank that holds only zeros must not set the scale.
  x[2], x[:, :8] = 0, 0
  y = apply(method, scales[:, None, None] * x)
  for one in y[:5]:
    chex.assert_trees_all_close(one, whole(x), atol=2e-5)
    assert not one[2].any() and not one[:, :8].any()
  assert not y[5].any()
  assert np.isnan(y[6]).all()


@pytest.mark.parametrize('dtype, exponents', [(jnp.float16, (-10, 12)), (jnp.bfloat16, (-100, 100))])
@pytest.mark.parametrize('method', METHODS.values(), ids=METHODS)
def test_half_precision(method, dtype, exponents):
  x = jnp.asarray(1 + np.abs(normal((8, 32)))).astype(dtype) * jnp.sign(normal((8, 32), 1)).astype(dtype)
  run, _ = sharded(method, x)
  y = np.asarray(run(x))
  # One rounding of a result of about 1 at most, at the very end.
  chex.assert_trees_all_close(y.astype(np.float32), whole(np.float32(x)), atol=8e-3)
  # Powers of two scale without rounding.
  for exponent in exponents:
    chex.assert_trees_all_equal(np.asarray(run(jnp.ldexp(x, exponent))), y)


@pytest.mark.parametrize('method', METHODS.values(), ids=METHODS)
def test_products_in_bfloat16(method):
  x = normal((8, 32))
  y = apply(method, x, coefficients=emopt_jax.QUINTIC, dtype=jnp.bfloat16)
  # bfloat16 operands carry 8 bits, 4e-3, through 15 products.
  chex.assert_trees_all_close(y, whole(x, emopt_jax.QUINTIC), atol=5e-2)


@pytest.mark.parametrize('method', [gram, per_step])
def test_float64(method):
  x = np.random.default_rng(0).standard_normal((8, 32))
  with jax.enable_x64(True):
    chex.assert_trees_all_close(apply(method, x, steps=16), oracles.polar(x), atol=1e-12)
