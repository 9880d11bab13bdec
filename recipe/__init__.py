"""Agentic RL for a Qwen3 checkpoint: tasks, policy, measurements and the evidence they rest on.

The modules import nothing heavy at the top: torch, transformers and trl are loaded by the functions that
run a model, so that ``--help`` and every refusal answer at once.
"""
