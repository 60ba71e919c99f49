#!lua flags=no-writes
-- parts: clock record wait_list lasting others
-- status: one look at the shard; it changes nothing.
-- Answers:
--   `stats`: all counters. `environments`: by name. `dead`: how many dead letters.
--   `workers`: rows of id, lease (ms left), requests held, the worker's description of itself.
--   `priorities`: rows of environment, priority, tenants, waiting (of the first 1,000 tenants), age of the
--     oldest (ms), how many requests an operator holds back, and the tenant with the most that wait, with
--     how many.
--   `quarantined`: rows of environment and count.
--   `paused`: the names that are held back, and since when (ms).
--   `decisions`: the scaler's, by environment. `weights`: by tenant.
--   `left`, `early_workers`, `early`: what other releases have, see parts/others.lua.
--   `memories`: rows of name and description, of the latest hundred replay memories.
local workers, priorities, quarantined = {}, {}, {}
local leases = redis.call('ZRANGE', tag .. ':workers', 0, -1, 'WITHSCORES')
for i = 1, #leases, 2 do
  local worker = leases[i]
  workers[#workers + 1] = {worker, leases[i + 1] - now, redis.call('ZCARD', tag .. ':processing:' .. worker),
    redis.call('HGET', tag .. ':info', worker) or ''}
end

-- Withdrawn requests that lists still name.
local withdrawn, all = {}, redis.call('HGETALL', tag .. ':withdrawn')
for i = 1, #all, 2 do withdrawn[all[i]] = tonumber(all[i + 1]) end
local function length(name)
  return math.max(0, redis.call('LLEN', tag .. ':' .. name) - (withdrawn[name] or 0))
end

-- Returns when the first waiting request of a list was submitted; nil if the first hundred have none.
local function first_submitted(name)
  local last = withdrawn[name] and 99 or 0
  for _, request_id in ipairs(redis.call('LRANGE', tag .. ':' .. name, 0, last)) do
    local r = record.load(request_id)
    if r and wait_list.name_of(r, redis.call('HGET', tag .. ':phase', request_id)) == name then
      return r.submitted
    end
  end
end

local function count_priority(environment, priority)
  local ring_name = environment .. ':' .. priority
  local tenants = redis.call('LRANGE', tag .. ':ring:' .. ring_name, 0, 999)
  local parked = redis.call('SMEMBERS', tag .. ':parked:' .. ring_name)
  local waiting, held, oldest, fullest, most = 0, 0, now, '', 0
  for _, tenant in ipairs(tenants) do
    local name = 'wait:' .. ring_name .. ':' .. tenant
    local n = length(name)
    waiting = waiting + n
    if n > most then fullest, most = tenant, n end
    oldest = math.min(oldest, first_submitted(name) or now)
  end
  for _, tenant in ipairs(parked) do held = held + length('wait:' .. ring_name .. ':' .. tenant) end
  if #tenants + #parked > 0 then
    local count = redis.call('LLEN', tag .. ':ring:' .. ring_name) + #parked
    priorities[#priorities + 1] = {environment, priority, count, waiting + held, now - oldest, held,
      fullest, most}
  end
end

local stats = redis.call('HGETALL', tag .. ':stats')
for i = 1, #stats, 2 do
  local environment = string.match(stats[i], '^waiting:(.*)$')
  if environment then
    for priority = 0, 2 do count_priority(environment, priority) end
    local n = length('quarantined:' .. environment)
    if n > 0 then quarantined[#quarantined + 1] = {environment, n} end
  end
end

-- Anybody may have written these names and keys, even with another type: a look must survive it.
local memories = {}
for _, name in ipairs(redis.call('ZRANGE', lasting .. ':replay:names', -100, -1)) do
  local about = redis.pcall('HGETALL', lasting .. ':replay:' .. name .. ':about')
  if #about > 0 then memories[#memories + 1] = {name, about} end
end
local early_workers, early = others.early()
return answer({left = others.left(stats), early_workers = early_workers, early = early, stats = stats, environments = redis.call('HGETALL', tag .. ':environments'),
  workers = workers, priorities = priorities, quarantined = quarantined,
  dead = redis.call('ZCARD', tag .. ':dead'), paused = redis.call('HGETALL', tag .. ':paused'),
  decisions = redis.call('HGETALL', tag .. ':scaler'), weights = redis.call('HGETALL', lasting .. ':weights'),
  memories = memories})
