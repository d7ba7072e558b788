"""Judging models: figures with intervals, and what the difference between two of them is worth."""

from groupwise.evaluation.figures import mcnemar_p_value, paired_comparison, pass_at_k
from groupwise.evaluation.judging import (
    Evaluation,
    EvaluationMode,
    build_summary,
    conditions,
    evaluate,
    evaluate_stage,
    held_out_prompts,
    sampling_settings,
)
from groupwise.evaluation.models import compare_models, evaluate_model, rescore, write_records
from groupwise.evaluation.records import is_well_formed

__all__ = [
    "Evaluation",
    "EvaluationMode",
    "build_summary",
    "compare_models",
    "conditions",
    "evaluate",
    "evaluate_model",
    "evaluate_stage",
    "held_out_prompts",
    "is_well_formed",
    "mcnemar_p_value",
    "paired_comparison",
    "pass_at_k",
    "rescore",
    "sampling_settings",
    "write_records",
]
