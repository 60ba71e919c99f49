#!lua flags=allow-oom
-- parts: replay replay_log
-- replay_refuse: counts entries that were not written because the server is short of memory. It also takes
-- out and counts the oldest entries, as many as `evict` says. A reservoir stays as it is.
-- Returns how many were counted; nothing if there is no such memory.
local about = replay.about()
if not about then return false end
local lost = refused + replay_log.evict(about, evict, about.max_bytes)
replay.keep(about)
redis.call('HINCRBY', replay.key('about'), 'dropped', lost)
return lost
