-- parts: clock
-- arguments: worker
-- each call: warmth.known = {}
-- What the worker is warm for: :warm:ENVIRONMENT:AFFINITY has the 1,000 workers that last settled such
-- a request, for three minutes, which is longer than a worker keeps a process for work that does not come.
local warmth = {}

-- What was noted is not noted again for so long: every result would, and no order needs to be finer.
local AGAIN_MS = 10000

-- When the worker was last noted to be warm (ms); nil where it is not.
function warmth.is_warm(environment, affinity)
  local warm = tag .. ':warm:' .. environment .. ':' .. affinity
  if warmth.known[warm] == nil then
    local at = redis.pcall('ZSCORE', warm, worker)
    -- An error, which a key of another kind is answered with, would end the script here, with the request
    -- that is asked about in no list.
    warmth.known[warm] = type(at) ~= 'table' and at
  end
  return warmth.known[warm]
end

-- Notes that the worker is warm for the stronger affinity of a request that it settled. The weaker one
-- says who else would do, and others are warm for that.
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
    -- It may be this worker itself that was removed.
    warmth.known[warm] = nil
  end
  redis.call('PEXPIRE', warm, 180000)
end

-- How warm the worker is for a request that names affinities: 1 for the stronger one, 2 for the weaker,
-- 3 where it is not.
function warmth.rank(r)
  if warmth.is_warm(r.environment, r.affinity) then return 1 end
  if r.second_affinity ~= '' and warmth.is_warm(r.environment, r.second_affinity) then return 2 end
  return 3
end
