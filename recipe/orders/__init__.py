"""German order tasks: the facts of an order must be looked up, its total calculated."""

import json

from recipe.orders.environment import OrderEnvironment
from recipe.orders.judge import Weights, judge, training_reward
from recipe.orders.scripts import PROBES, careful
from recipe.orders.tasks import WORDINGS, Order, draw
from recipe.task.family import Family

FAMILY = Family(
    name="orders",
    title="German order tasks",
    task=Order,
    splits=tuple(WORDINGS),
    draw=draw,
    environment=OrderEnvironment,
    judge=judge,
    weights=Weights,
    reward=training_reward,
    milestones={"verified_lookup": "verified lookup", "verified_calculation": "verified calculation"},
    example=lambda order: json.dumps({"menge": order.quantity, "einzelpreis": order.unit_price}),
    careful=careful,
    probes=PROBES,
)
