"""vLLM as the sampling engine: a server in vLLM's environment, and the engine that drives it from the trainer's.

The trainer's side: ``engine`` (sampling) -> ``pushing`` (weights) -> ``client`` (HTTP). vLLM's side: ``__main__`` -> ``server`` (HTTP) ->
``service`` (which weights are held) -> ``backend`` (vLLM's engine, and what runs inside its workers). ``protocol`` is what they share.
"""
