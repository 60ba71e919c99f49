#!lua flags=allow-oom
-- parts: clock
-- replay_open: makes a replay memory unless it exists, and adds it to those that status shows. Numbers
-- begin at the time in microseconds, so a new memory's numbers are above those of one dropped before.
-- Answers the bounds that hold, and the number before the first.
local key = tag .. ':replay:' .. name .. ':about'
if redis.call('EXISTS', key) == 0 then
  local base = string.format('%.0f', now * 1000)
  redis.call('HSET', key, 'entries', entries, 'max_bytes', max_bytes, 'reservoir', reservoir, 'weighted', weighted,
    'base', base, 'last', base, 'bytes', 0, 'seen', 0, 'capacity', entries, 'slot_bytes', 0, 'evicted', 0)
end
redis.call('ZADD', tag .. ':replay:names', 'NX', now, name)
local r = redis.call('HMGET', key, 'entries', 'max_bytes', 'reservoir', 'weighted', 'base')
return answer({entries = tonumber(r[1]), max_bytes = tonumber(r[2]), reservoir = tonumber(r[3]),
  weighted = tonumber(r[4]), base = r[5]})
