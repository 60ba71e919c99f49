#!lua flags=no-writes
-- parts: replay samples random
-- replay_sample: draws entries with replacement, independently of each other. It stops when there are
-- `count`, when their bytes reach `max_bytes`, or when the random numbers are used up.
-- A draw by weight picks a class by the bound of its sum, and then any member of the class. It takes the
-- member with a probability of its weight over the bound, at least four fifths, or else draws again. That
-- takes 1.25 attempts on average, or fewer.
-- Returns number, entry, number, entry …; nothing if there is no such memory.
local about = replay.about()
if not about then return false end
local log, slots = replay.key('log'), replay.key('slots')
local entries = about.reservoir and redis.call('HLEN', slots) or redis.call('XLEN', log)
local first = about.reservoir and 0 or about.last - entries + 1

local function any()
  local r = random.take(1)
  return r and replay.text(first + math.floor(r[1] * entries))
end

local classes, bound = {}, 0
if by_weight then
  local r = redis.call('HGETALL', replay.key('classes'))
  for i = 1, #r, 2 do
    local class = {name = r[i], count = tonumber(r[i + 1]), most = samples.bound(tonumber(r[i]))}
    class.bound = class.count * class.most
    classes[#classes + 1], bound = class, bound + class.bound
  end
end
if by_weight and bound == 0 or entries == 0 then return {} end

local function by_its_weight()
  while true do
    local r = random.take(3)
    if not r then return nil end
    local at, i = r[1] * bound, 1
    while i < #classes and at >= classes[i].bound do
      at, i = at - classes[i].bound, i + 1
    end
    local place = classes[i].name .. ':' .. math.floor(r[2] * classes[i].count) + 1
    local found = redis.call('HGET', replay.key('index'), place)
    local member, weight = string.match(found, '^(%S+) (%S+)$')
    if r[3] * classes[i].most < tonumber(weight) then return member end
  end
end

local found, bytes = {}, 0
while #found < 2 * count and bytes < max_bytes do
  local member = (by_weight and by_its_weight or any)()
  if not member then break end
  local number, entry = member, nil
  if about.reservoir then number, entry = string.match(redis.call('HGET', slots, member), '^(%d+) (.*)$')
  else entry = redis.call('XRANGE', log, member, member, 'COUNT', 1)[1][2][2] end
  found[#found + 1], found[#found + 2] = number, entry
  bytes = bytes + #entry
end
return found
