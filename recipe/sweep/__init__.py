"""A search over settings of training: several trials, compared on the development split, one of them chosen.

Nothing here knows of Determined::

    records    what a sweep, a trial and a chosen plan say of each other
    space      which settings are tried, read from a YAML in Determined's own form
    frozen     space.json: what is frozen before the first trial
    trial      one trial: a plan of its own, development at step 0, GRPO, validations on development
    table      the trials as they lie on disk, gathered into sweep.json
    choice     the rule, frozen beforehand, that names the winner

A trial's plan has no test split: it is not drawn, and the stages that measure on it refuse such a plan. The full run
that the winner is promoted to is the first to see it.
"""
