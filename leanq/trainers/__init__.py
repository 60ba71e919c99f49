"""For those who train provers, and for their agents and tests.

- ``rewards`` scores completions against the statements of their problems;
- ``search`` is proof search over states, in the order of one of the ``strategies``;
- ``trl_reward``, ``verifiers_taskset``, ``openenv_server`` and ``reward_server`` (HTTP) are those
  rewards, and steps, as these trainers take them; ``feedback`` is what a model is told in between;
- ``replay`` is a memory in Redis for learners, of the entries in ``replay_entry``
  and as large as ``replay_bounds`` says; rewards and campaigns write to it by ``replay_writer``;
- ``mcp_server`` has tools for agents, behind ``leanq mcp``;
- ``testing`` has clients without a fleet, and a queue as a fixture.
"""
