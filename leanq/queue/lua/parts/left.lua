-- parts: record
-- Requests whose records this release cannot read, since another release wrote them. Each script leaves them
-- to those who can: in the list wait:ENVIRONMENT:left:VERSION, where no claim of this release looks again.
-- Version 0 has damaged records, which nobody reads.
-- An entry is the request id and its place: the list in which it waited, or how to requeue it (see
-- requeue.lua). The record, its body and the list last a week, so what a release left that never comes back
-- goes away. A client that still waits then sends its request again.
local left = {WEEK_MS = 604800000}

-- Returns the key of what an environment's claims left of a version.
function left.key(environment, version) return tag .. ':wait:' .. environment .. ':left:' .. version end

function left.put(environment, version, request_id, place)
  local key = left.key(environment, version)
  redis.call('RPUSH', key, request_id .. ' ' .. place)
  for _, each in ipairs({key, tag .. ':req:' .. request_id, record.body_key(request_id)}) do
    redis.call('PEXPIRE', each, left.WEEK_MS)
  end
  -- Looks find the list by this name.
  redis.call('HSET', tag .. ':stats', 'left:' .. version .. ':' .. environment, 1)
end
