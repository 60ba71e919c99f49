-- parts: replay
-- Keeps the members from which weighted samples are drawn. Each member is in the class of its weight; there
-- are four classes for each power of two. It may have any place there, so it can leave as fast as it came.
-- `classes`: class → members; `index`: CLASS:PLACE (from 1) → member, blank, weight; `places`: member →
-- CLASS:PLACE. Counts are kept but no sums, which would lose precision in time.
local samples = {}

-- Returns the number of the class: eight times the exponent, and the fraction's eighths, from 4 to 7.
function samples.class(weight)
  local fraction, exponent = math.frexp(weight)
  return 8 * exponent + math.floor(8 * fraction)
end

-- Returns the bound of a class: all its weights are below it, and at least four fifths of it.
function samples.bound(class)
  return math.ldexp(class % 8 + 1, math.floor(class / 8) - 3)
end

function samples.add(member, weight)
  -- Ignore weights that are no numbers or infinite: every draw would pick an infinite one.
  if not (weight > 0 and weight < math.huge) then return end
  local class = samples.class(weight)
  local place = class .. ':' .. redis.call('HINCRBY', replay.key('classes'), class, 1)
  redis.call('HSET', replay.key('index'), place, string.format('%s %.17g', member, weight))
  redis.call('HSET', replay.key('places'), member, place)
end

-- Removes a member, and returns its weight. The last member of its class takes its place.
function samples.remove(member)
  local index, places, classes = replay.key('index'), replay.key('places'), replay.key('classes')
  local place = redis.call('HGET', places, member)
  if not place then return 0 end
  local weight = string.match(redis.call('HGET', index, place), '%S+$')
  local class = string.match(place, '^[^:]+')
  local left = redis.call('HINCRBY', classes, class, -1)
  local last = class .. ':' .. left + 1
  if last ~= place then
    local moved = redis.call('HGET', index, last)
    redis.call('HSET', index, place, moved)
    redis.call('HSET', places, string.match(moved, '^%S+'), place)
  end
  redis.call('HDEL', index, last)
  redis.call('HDEL', places, member)
  if left == 0 then redis.call('HDEL', classes, class) end
  return tonumber(weight)
end
