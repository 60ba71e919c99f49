-- parts: clock record phase wait_list waiting lease counters recall
-- arguments: worker
-- Requests that submit reserved to warm and idle workers, for 100 ms.
local reservations = {}

-- What other workers were reserved and did not come for, each to the front of its waiting list.
function reservations.reassign()
  local late = redis.call('ZRANGEBYSCORE', tag .. ':reservations', '-inf', now, 'LIMIT', 0, 16)
  -- The oldest last, so that it comes to stand first.
  for i = #late, 1, -1 do
    if late[i] ~= worker then counters.add('reassignments', recall(late[i])) end
  end
end

-- Takes up to n requests that this worker was reserved; how many these were.
function reservations.claim(n)
  local got = 0
  while got < n do
    local request_id = redis.call('LPOP', tag .. ':reservation:' .. worker)
    if not request_id then break end
    if redis.call('HGET', tag .. ':phase', request_id) == phase.reserved(worker) then
      redis.call('HDEL', tag .. ':phase', request_id)
      local known = record.load(request_id)
      local r = known and waiting.among({wait_list.name_of(known)}, {request_id})[1]
      if r and lease.take(r, false) then got = got + 1 end
    end
  end
  return got
end

-- One worker watches over all reservations: it claims again when the first of them expires. Its note
-- expires then as well; '' is a note that any worker may take. A worker that came for reservations of its
-- own leaves the note to others. Returns after how long (ms) this worker should claim, or 0 where it does
-- not watch.
function reservations.watch(claimed)
  local watchdog = tag .. ':watchdog'
  local holder = redis.call('GET', watchdog)
  if claimed > 0 or holder and holder ~= '' and holder ~= worker then return 0 end
  local soonest = tonumber(redis.call('ZRANGE', tag .. ':reservations', 0, 0, 'WITHSCORES')[2])
  if not soonest and not holder then return 0 end
  -- What it was woken for may be over, and more to come.
  local wait_ms = soonest and math.max(soonest - now, 1) or 100
  redis.call('SET', watchdog, worker, 'PX', wait_ms)
  return wait_ms
end
