"""Whole matrices over a mesh: the plan, the wrapper, and what goes with them."""

from emopt_jax.distributed.checkpoint import logical_state as logical_state
from emopt_jax.distributed.checkpoint import physical_state as physical_state
from emopt_jax.distributed.costs import elementwise_cost as elementwise_cost
from emopt_jax.distributed.costs import newton_schulz_cost as newton_schulz_cost
from emopt_jax.distributed.costs import soap_cost as soap_cost
from emopt_jax.distributed.gradients import value_and_grad as value_and_grad
from emopt_jax.distributed.layerwise import LayerwiseState as LayerwiseState
from emopt_jax.distributed.layerwise import layerwise as layerwise
from emopt_jax.distributed.plan import Plan as Plan
from emopt_jax.distributed.plan import plan_layerwise as plan_layerwise
from emopt_jax.distributed.state_specs import logical_shardings as logical_shardings
from emopt_jax.distributed.state_specs import logical_specs as logical_specs
from emopt_jax.distributed.state_specs import state_shardings as state_shardings
from emopt_jax.distributed.state_specs import state_specs as state_specs
from emopt_jax.distributed.tensor_parallel import cheapest as cheapest
from emopt_jax.distributed.tensor_parallel import duplicated as duplicated
from emopt_jax.distributed.tensor_parallel import gram as gram
from emopt_jax.distributed.tensor_parallel import per_step as per_step
from emopt_jax.distributed.traffic import Traffic as Traffic
from emopt_jax.distributed.traffic import compare_traffic as compare_traffic
from emopt_jax.distributed.traffic import traffic_in_jit as traffic_in_jit
from emopt_jax.distributed.traffic import traffic_inside_shard_map as traffic_inside_shard_map
from emopt_jax.distributed.traffic import traffic_on_every_rank as traffic_on_every_rank
