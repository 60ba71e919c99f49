-- arguments: name
-- A replay memory's keys, and what it says of itself. Its log is a stream whose ids count up by one, so that
-- the number of the oldest entry follows from the last and the length. A reservoir keeps its entries once
-- more: slot (from 0) → number, blank, entry.
local replay = {}

function replay.key(kind) return tag .. ':replay:' .. name .. ':' .. kind end

-- Numbers count from the microseconds at which the memory was made: too many digits for Lua's own text.
function replay.text(number) return string.format('%.0f', number) end

-- Nothing where there is no such memory.
function replay.about()
  local r = redis.call('HMGET', replay.key('about'), 'entries', 'max_bytes', 'reservoir', 'weighted', 'last',
    'bytes', 'seen', 'capacity', 'slot_bytes', 'evicted')
  if not r[1] then return nil end
  return {entries = tonumber(r[1]), max_bytes = tonumber(r[2]), reservoir = r[3] == '1', weighted = r[4] == '1',
    last = tonumber(r[5]), bytes = tonumber(r[6]), seen = tonumber(r[7]), capacity = tonumber(r[8]),
    slot_bytes = tonumber(r[9]), evicted = tonumber(r[10])}
end

-- Writes down what changed.
function replay.keep(about)
  redis.call('HSET', replay.key('about'), 'last', replay.text(about.last), 'bytes', about.bytes,
    'seen', replay.text(about.seen), 'capacity', about.capacity, 'slot_bytes', about.slot_bytes,
    'evicted', replay.text(about.evicted))
end
