"""TRL's names over this project: ``from groupwise.trl import GRPOConfig, GRPOTrainer`` runs an existing script.

``docs/how-to/coming-from-trl.md`` says what every argument does here. TRL itself is not needed.
"""

from groupwise.trl.config import GRPOConfig
from groupwise.trl.trainer import GRPOTrainer

__all__ = ["GRPOConfig", "GRPOTrainer"]
