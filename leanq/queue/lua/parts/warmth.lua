-- parts: clock
-- arguments: worker
-- What the worker is warm for: :warm:ENVIRONMENT:AFFINITY has the 16 workers that last settled such a
-- request, for three minutes, which is longer than a worker keeps a process for work that does not come.
local warmth = {noted = {}, known = {}}

-- Notes that the worker is warm for the stronger affinity of a request that it settled. The weaker one
-- says who else would do, and others are warm for that.
function warmth.note(environment, affinity)
  local warm = tag .. ':warm:' .. environment .. ':' .. affinity
  if warmth.noted[warm] then return end
  warmth.noted[warm] = true
  if redis.call('ZADD', warm, now, worker) == 1 then
    redis.call('ZREMRANGEBYRANK', warm, 0, -1 - 16)
  end
  redis.call('PEXPIRE', warm, 180000)
end

function warmth.is_warm(environment, affinity)
  local warm = tag .. ':warm:' .. environment .. ':' .. affinity
  if warmth.known[warm] == nil then warmth.known[warm] = redis.call('ZSCORE', warm, worker) end
  return warmth.known[warm]
end

-- How warm the worker is for a request that names affinities: 1 for the stronger one, 2 for the weaker,
-- 3 where it is not.
function warmth.rank(r)
  if warmth.is_warm(r.environment, r.affinity) then return 1 end
  if r.second_affinity ~= '' and warmth.is_warm(r.environment, r.second_affinity) then return 2 end
  return 3
end
