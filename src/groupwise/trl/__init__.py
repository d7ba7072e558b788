"""TRL's names over this project: ``from groupwise.trl import GRPOConfig, GRPOTrainer`` runs an existing script.

``python -m groupwise.trl`` says what every argument does here. TRL itself is not needed.
"""

from groupwise.models.quiet import quieten_bitsandbytes

quieten_bitsandbytes()  # transformers' trainer modules import it by way of peft

from groupwise.trl.config import GRPOConfig  # noqa: E402
from groupwise.trl.trainer import GRPOTrainer  # noqa: E402

__all__ = ["GRPOConfig", "GRPOTrainer"]
