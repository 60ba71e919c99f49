#!lua
-- parts: replay replay_log samples random
-- replay_write: adds entries, each a row of its weight and its bytes, and takes out entries beyond the
-- bounds. A call with the writer's last serial changes nothing, so it may be repeated when its answer was
-- lost. A server with a full memory refuses it.
-- Returns the number of the last entry, or nothing if there is no such memory.
local about = replay.about()
if not about then return false end
local done = redis.call('GET', replay.key('writer:' .. writer))
if done and string.match(done, '^%S+') == serial then return string.match(done, '%S+$') end
local log, slots = replay.key('log'), replay.key('slots')

local function empty(slot)
  local old = redis.call('HGET', slots, slot)
  about.slot_bytes = about.slot_bytes - #old + string.find(old, ' ', 1, true)
  samples.remove(slot)
end

-- Keeps each entry ever written in the reservoir with the same probability.
local function choose(number, entry, weight)
  about.seen = about.seen + 1
  local slot = redis.call('HLEN', slots)
  if slot >= about.capacity then
    slot = math.floor(random.take(1)[1] * about.seen)
    if slot >= about.capacity then return end
    empty(slot)
  end
  redis.call('HSET', slots, slot, number .. ' ' .. entry)
  about.slot_bytes = about.slot_bytes + #entry
  if about.weighted then samples.add(slot, weight) end
end

-- Removes a random slot and its room: if a later entry filled it, its chance would be unequal. Returns
-- false if no random number is left; the next call goes on.
local function shrink()
  local r, last = random.take(1), redis.call('HLEN', slots) - 1
  if not r then return false end
  local slot = math.floor(r[1] * (last + 1))
  empty(slot)
  if slot ~= last then
    redis.call('HSET', slots, slot, redis.call('HGET', slots, last))
    samples.add(slot, samples.remove(last))
  end
  redis.call('HDEL', slots, last)
  about.capacity = last
  return true
end

for i, entry in ipairs(items.entry) do
  local weight = items.weight[i]
  about.last = about.last + 1
  local number = replay.text(about.last)
  redis.call('XADD', log, number .. '-0', '', entry)
  about.bytes = about.bytes + #entry
  if about.reservoir then choose(number, entry, weight)
  elseif about.weighted then samples.add(number, weight) end
end
while about.slot_bytes > about.max_bytes and shrink() do end
replay_log.evict(about, redis.call('XLEN', log) - about.entries, about.max_bytes)
replay.keep(about)
local last = replay.text(about.last)
redis.call('SET', replay.key('writer:' .. writer), serial .. ' ' .. last, 'PX', writer_ms)
return last
