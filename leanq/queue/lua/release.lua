#!lua flags=allow-oom
-- parts: phase publish counters requeue forget_worker shares
-- release: gives unfinished work back to the front. `how`: requeue, retry (the attempt counts) or defer (to
-- the end of its waiting list). `leave`: the worker leaves the fleet.
-- Returns how many requests were given back; a token that is no longer current changes nothing.
local given, shares = 0, nil
-- Go from the last to the first, so that the front of the list keeps their order.
for i = #leases.request_id, 1, -1 do
  local request_id = leases.request_id[i]
  local lease = phase.read_lease(redis.call('HGET', tag .. ':phase', request_id))
  if lease and lease.token == leases.token[i] then
    if lease.charge ~= '' and how ~= 'retry' then
      shares = shares or open_shares()
      if shares then shares.correct(lease) end
    end
    requeue.run(request_id, how, how)
    redis.call('ZREM', tag .. ':processing:' .. worker, request_id)
    given = given + 1
  end
end
if shares then shares.write() end
counters.add('released', given)
publish.all()
counters.write()
-- A worker that still has work stays known, so that the reaper finds the work.
if leave and redis.call('EXISTS', tag .. ':processing:' .. worker) == 0 then forget_worker(worker) end
return given
