#!lua flags=allow-oom
-- parts: clock publish counters requeue grace forget_worker
-- reap: requeues requests of one worker whose lease has expired. One call takes at most 100, or fewer if
-- many requests joined them.
-- Answers queued and poisoned: how many requests became either; more: 1 if there may be more to reap;
-- expiry_grace_ms: time until leases are judged again.
local judged_at = grace_ends()
if now < judged_at then
  return answer({queued = 0, poisoned = 0, more = 0, expiry_grace_ms = judged_at - now})
end
local worker = redis.call('ZRANGEBYSCORE', tag .. ':workers', '-inf', now, 'LIMIT', 0, 1)[1]
if not worker then return answer({queued = 0, poisoned = 0, more = 0, expiry_grace_ms = 0}) end
local processing = tag .. ':processing:' .. worker
local ends = {queued = 0, poisoned = 0, lost = 0}
for _, request_id in ipairs(redis.call('ZRANGE', processing, 0, 99)) do
  local became = requeue.run(request_id, 'retry', 'reaped')
  redis.call('ZREM', processing, request_id)
  ends[became] = ends[became] + 1
  if requeue.is_full() then break end
end
if redis.call('EXISTS', processing) == 0 then forget_worker(worker) end
counters.add('reaped', ends.queued + ends.poisoned)
publish.all()
counters.write()
return answer({queued = ends.queued, poisoned = ends.poisoned, more = 1, expiry_grace_ms = 0})
