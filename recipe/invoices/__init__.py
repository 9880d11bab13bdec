"""German invoices: customer and articles are found through the invoice, and the total takes every one of them."""

from recipe.invoices.environment import InvoiceEnvironment, invoice_record
from recipe.invoices.judge import Weights, judge, strayed, training_reward
from recipe.invoices.scripts import PROBES, careful
from recipe.invoices.tasks import WORDINGS, Invoice, draw
from recipe.task.family import Family, Missed, called

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
    missed={
        "verified_invoice": Missed(called("lookup"), wrong="wrong record", omitted="no lookup"),
        "verified_articles": Missed(strayed, wrong="wrong record", omitted="article not looked up"),
        "verified_discount": Missed(strayed, wrong="wrong record", omitted="discount not looked up"),
        "verified_calculation": Missed(
            called("calculator"), wrong="calculation not from retrieved values", omitted="no calculation"
        ),
    },
    example=invoice_record,
    careful=careful,
    probes=PROBES,
    # Three articles take six calls; two more leave room for a mistake. A careful rollout takes about 700 tokens.
    defaults={"agent": {"max_tool_iterations": 8, "max_tokens": 1536}},
)
