-- parts: clock phase wait_list wakeup
-- Reservations: a request that names affinities goes to a worker that is warm for one and idle, where
-- nothing waits before it. It enters no waiting list: that worker is told, and comes for it within
-- milliseconds. After 100 ms it is dead or stuck, and any claim reassigns what it was reserved.
local reserve = {workers = {}, environment = nil}

-- The worker to be reserved a request: idle, and warm for the strongest affinity possible. None where
-- something else waits in the environment, which has the first claim to any idle worker.
function reserve.warm_worker(environment, kind)
  if environment.blocked == nil then
    environment.blocked = environment.paused or wait_list.any(environment.name)
  end
  if environment.blocked then return nil end
  for _, affinity in ipairs({kind.affinity, kind.second_affinity}) do
    local workers = affinity ~= ''
      and redis.call('ZREVRANGE', tag .. ':warm:' .. environment.name .. ':' .. affinity, 0, -1) or {}
    local available = #workers > 0 and redis.call('HMGET', tag .. ':available', unpack(workers))
    for i, worker in ipairs(workers) do
      if tonumber(available[i] or 0) > 0
        and tonumber(redis.call('ZSCORE', tag .. ':workers', worker) or 0) > now then
        return worker
      end
    end
  end
  return nil
end

function reserve.give(environment, request_id, worker)
  redis.call('HSET', tag .. ':phase', request_id, phase.reserved(worker))
  redis.call('HINCRBY', tag .. ':available', worker, -1)
  redis.call('ZADD', tag .. ':reservations', 'NX', now + 100, worker)
  -- The claim that takes the first takes all.
  if redis.call('RPUSH', tag .. ':reservation:' .. worker, request_id) == 1 then
    redis.call('RPUSH', tag .. ':stop:' .. worker, '+')
  end
  environment.reserved = environment.reserved + 1
  reserve.workers[worker], reserve.environment = true, environment.name
end

-- Wakes one more worker to watch over reservations, unless one does so already that was reserved
-- nothing: a worker that died would not watch over its own.
function reserve.post_watchdog()
  if not reserve.environment then return end
  local watchdog = tag .. ':watchdog'
  local holder = redis.call('GET', watchdog)
  if holder and not reserve.workers[holder] then return end
  redis.call('SET', watchdog, '', 'PX', 100)
  if redis.call('ZCARD', tag .. ':workers') > 1 then notify(reserve.environment, 1) end
end
