-- parts: clock publish counters
-- Requests that missed their deadline in the queue.
local deadline = {}

function deadline.is_past(r) return r.deadline > 0 and now > r.deadline end

-- Ends such a request after so many attempts; `waited`: it stood in a waiting list.
function deadline.expire(request_id, r, attempts, waited)
  local reply = publish.verdict(r, 'expired', 'deadline', attempts, now - r.submitted)
  publish.finish(request_id, r, reply)
  counters.ended(r.environment, 'expired', 'deadline', 1)
  if waited then counters.add('waiting:' .. r.environment, -1) end
end
