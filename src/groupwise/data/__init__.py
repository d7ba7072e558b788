"""Problems, prompts, and how answers are compared."""
