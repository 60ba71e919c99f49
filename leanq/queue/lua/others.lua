#!lua flags=no-writes
-- parts: clock others
-- others: what other releases have in this shard; see parts/others.lua.
-- Answers left: rows of version, environment, waiting. workers: how many of early releases are alive.
--   early: rows of environment, waiting, and the beginning of a record.
local workers, early = others.early()
return answer({left = others.left(redis.call('HGETALL', tag .. ':stats')), workers = workers, early = early})
