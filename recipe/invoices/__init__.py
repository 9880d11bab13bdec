"""German invoices: customer and articles are found through the invoice, and the total takes every one of them."""

from recipe.invoices.environment import InvoiceEnvironment, invoice_record
from recipe.invoices.judge import Weights, judge, training_reward
from recipe.invoices.scripts import PROBES, careful
from recipe.invoices.tasks import WORDINGS, Invoice, draw
from recipe.task.family import Family

FAMILY = Family(
    name="invoices",
    title="German multi-hop invoices",
    task=Invoice,
    splits=tuple(WORDINGS),
    draw=draw,
    environment=InvoiceEnvironment,
    judge=judge,
    weights=Weights,
    reward=training_reward,
    milestones={
        "verified_invoice": "verified invoice",
        "verified_articles": "verified articles",
        "verified_discount": "verified discount",
        "verified_calculation": "verified calculation",
    },
    example=invoice_record,
    careful=careful,
    probes=PROBES,
    # Three articles take six calls; two more leave room for a mistake. A careful rollout takes about 700 tokens.
    defaults={"agent": {"max_tool_iterations": 8, "max_tokens": 1536}},
)
