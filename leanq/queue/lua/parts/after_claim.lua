-- parts: clock counters wait_list wakeup
-- arguments: worker lease_ms
-- What a worker's claim means for the fleet.
local after_claim = {}

-- Wakes one more worker if this one leaves requests waiting. `more`: some list is known not to be empty.
function after_claim.wake_another(environment, more)
  if counters.value('waiting:' .. environment) > 0 and (more or wait_list.any(environment)) then
    notify(environment, 1)
  end
end

-- Extends the lease of a worker that holds requests. One that holds none may have a longer lease, and leaves
-- nothing to reap.
function after_claim.extend_lease(held)
  if held > 0 then redis.call('ZADD', tag .. ':workers', now + lease_ms, worker) end
end
