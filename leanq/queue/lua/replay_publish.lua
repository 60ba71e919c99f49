#!lua flags=allow-oom
-- parts: clock replay
-- replay_publish: puts a value in the place of the one before, if that still has the version `expected`
-- (empty: whatever it has; 0: there is none). A version is higher than the one before, and begins at the
-- time in ms, so that it goes up even where the server has forgotten all.
-- Returns the version, or nothing where another was published meanwhile.
local key = replay.key('value')
local before = redis.call('XREVRANGE', key, '+', '-', 'COUNT', 1)[1]
local version = before and tonumber(string.match(before[1], '%d+')) or 0
if expected ~= '' and tonumber(expected) ~= version then return false end
local next_version = replay.text(math.max(version + 1, now))
redis.call('XADD', key, 'MAXLEN', '=', 1, next_version .. '-0', '', value)
return next_version
