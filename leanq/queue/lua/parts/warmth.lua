-- parts: clock
-- arguments: worker
-- each call: warmth.known = {}
-- Knows what the worker is warm for. The set :warm:ENVIRONMENT:AFFINITY has the 1,000 workers that last
-- settled such a request. It lasts three minutes, longer than a worker keeps a process for work that does
-- not come.
local warmth = {}

-- Refresh a note at most every 10 s; otherwise every result would write.
local AGAIN_MS = 10000

-- Returns when the worker was last noted to be warm (ms); nil if it is not.
function warmth.is_warm(environment, affinity)
  local warm = tag .. ':warm:' .. environment .. ':' .. affinity
  if warmth.known[warm] == nil then
    local at = redis.pcall('ZSCORE', warm, worker)
    -- A key of another type answers with an error. Raised here, it would end the script while the request
    -- in question is in no list.
    warmth.known[warm] = type(at) ~= 'table' and at
  end
  return warmth.known[warm]
end

-- Notes that the worker is warm for the stronger affinity of a request that it settled. The weaker one only
-- names other workers that would do.
function warmth.note(environment, affinity)
  local warm = tag .. ':warm:' .. environment .. ':' .. affinity
  local noted = tonumber(warmth.is_warm(environment, affinity) or 0)
  if now - noted < AGAIN_MS then return end
  warmth.known[warm] = now
  local added = redis.pcall('ZADD', warm, now, worker)
  if type(added) == 'table' then
    redis.call('UNLINK', warm)
    added = redis.call('ZADD', warm, now, worker)
  end
  if added == 1 and redis.call('ZREMRANGEBYRANK', warm, 0, -1 - 1000) > 0 then
    -- The removed worker may be this one.
    warmth.known[warm] = nil
  end
  redis.call('PEXPIRE', warm, 180000)
end

-- Returns how warm the worker is for a request with affinities: 1 for the stronger one, 2 for the weaker, 3
-- for neither.
function warmth.rank(r)
  if warmth.is_warm(r.environment, r.affinity) then return 1 end
  if r.second_affinity ~= '' and warmth.is_warm(r.environment, r.second_affinity) then return 2 end
  return 3
end
