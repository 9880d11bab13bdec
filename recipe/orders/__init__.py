"""German order tasks: the facts of an order must be looked up, its total calculated."""

import json

from recipe.orders.environment import OrderEnvironment
from recipe.orders.judge import Weights, judge, training_reward
from recipe.orders.scripts import PROBES, careful
from recipe.orders.tasks import WORDINGS, Order, draw
from recipe.task.family import Family, Missed, called

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
    missed={
        "verified_lookup": Missed(called("lookup"), wrong="wrong record", omitted="no lookup"),
        "verified_calculation": Missed(
            called("calculator"), wrong="calculation not from retrieved values", omitted="no calculation"
        ),
    },
    example=lambda order: json.dumps({"menge": order.quantity, "einzelpreis": order.unit_price}),
    careful=careful,
    probes=PROBES,
)
