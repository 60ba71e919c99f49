#!lua flags=allow-oom
-- parts: clock replay
-- replay_publish: replaces a value if it still has the version `expected` (empty: any version; 0: no value
-- yet). Each version is higher than the one before. It is at least the time in ms, so it rises even after
-- the server has forgotten all.
-- Returns the version, or nothing if another value was published meanwhile.
local key = replay.key('value')
local before = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
local version = before and tonumber(string.match(before[1], '%d+')) or 0
if expected ~= '' and expected ~= version then return false end
local next_version = replay.text(math.max(version + 1, now))
redis.call('XADD', key, 'MAXLEN', '=', 1, next_version .. '-0', '', value)
return next_version
