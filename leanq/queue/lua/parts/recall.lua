-- parts: record phase wait_list wakeup
-- Ends all reservations to a worker: what it was reserved goes to the front, for any worker, and it is
-- reserved nothing more until its next claim. Returns how many requests these were.
local function recall(worker)
  local reservation, recalled = tag .. ':reservation:' .. worker, 0
  local request_ids, reserved = redis.call('LRANGE', reservation, 0, -1), phase.reserved(worker)
  -- From the last to the first, so that the front of the list keeps their order.
  for i = #request_ids, 1, -1 do
    local r = redis.call('HGET', tag .. ':phase', request_ids[i]) == reserved
      and record.load(request_ids[i])
    if r then
      redis.call('HDEL', tag .. ':phase', request_ids[i])
      wait_list.put('LPUSH', request_ids[i], r)
      notify(r.environment, 1)
      recalled = recalled + 1
    end
  end
  redis.call('UNLINK', reservation)
  redis.call('ZREM', tag .. ':reservations', worker)
  redis.call('HDEL', tag .. ':available', worker)
  return recalled
end
