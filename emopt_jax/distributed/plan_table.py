"""The table that a plan prints."""


def plan_table(plan) -> str:
  return 'plan'
