-- arguments: name
-- The keys of a replay memory, and its description of itself. The ids of its log, a stream, count up by
-- one, so the last number and the length give the oldest entry's number. A reservoir keeps its entries once
-- more: slot (from 0) → number, blank, entry.
local replay = {}

function replay.key(kind) return tag .. ':replay:' .. name .. ':' .. kind end

-- Numbers count from the memory's creation in microseconds: too many digits for Lua's own text.
function replay.text(number) return string.format('%.0f', number) end

-- Returns the memory's description; nil if there is no such memory.
function replay.about()
  local r = redis.call('HMGET', replay.key('about'), 'entries', 'max_bytes', 'reservoir', 'weighted', 'last',
    'bytes', 'seen', 'capacity', 'slot_bytes', 'evicted')
  if not r[1] then return nil end
  return {entries = tonumber(r[1]), max_bytes = tonumber(r[2]), reservoir = r[3] == '1', weighted = r[4] == '1',
    last = tonumber(r[5]), bytes = tonumber(r[6]), seen = tonumber(r[7]), capacity = tonumber(r[8]),
    slot_bytes = tonumber(r[9]), evicted = tonumber(r[10])}
end

function replay.keep(about)
  redis.call('HSET', replay.key('about'), 'last', replay.text(about.last), 'bytes', about.bytes,
    'seen', replay.text(about.seen), 'capacity', about.capacity, 'slot_bytes', about.slot_bytes,
    'evicted', replay.text(about.evicted))
end
