-- each call: record.last = nil
-- The record of a request in flight: one string, which its reply replaces. It begins with numbers: the kind
-- of record, attempts that have ended, priority, submitted (ms), deadline in the queue (ms, 0: none),
-- longest run (ms). Texts follow: environment, client, the stronger and the weaker affinity, lost attempts
-- (see requeue.lua), tenant, digest, body.
-- The client packed the body. A detached request's body is in :body:ID, since Lua hashes each text that it
-- is given. Its record ends with the body's size. The file leanq/queue/results.py reads the same layout.
local record = {LAYOUT = '>BBBdddsssssss', WHOLE = 1, DETACHED = 2}

-- Returns the fields of a record's text, with `body` as the place where the body begins; nil for other
-- texts.
function record.read(text)
  local kind = text and string.byte(text)
  if kind ~= record.WHOLE and kind ~= record.DETACHED then return nil end
  local whole, _, attempts, priority, submitted, deadline, run_ms, environment, client, affinity,
    second_affinity, lost, tenant, digest, body = pcall(struct.unpack, record.LAYOUT, text)
  -- Any process may have written it, and an error would end the call for all its requests.
  if not whole then return nil end
  return {attempts = attempts, priority = priority, submitted = submitted, deadline = deadline,
    run_ms = run_ms, environment = environment, client = client, affinity = affinity,
    second_affinity = second_affinity, lost = lost, tenant = tenant, digest = digest, body = body,
    detached = kind == record.DETACHED}
end

-- Reads records one after another. Records that differ only in their bodies, as most of one batch do, share
-- one table. So callers must add nothing to it that concerns a single request.
function record.read_next(text)
  local last = record.last
  if last and text and string.sub(text, 1, last.body - 1) == last.head then return last end
  local r = record.read(text)
  -- Requests with digests all differ.
  record.last = r and r.digest == '' and r
  if record.last then r.head = string.sub(text, 1, r.body - 1) end
  return r
end

-- Returns the record of a request without its body; nil if there is none.
function record.load(request_id)
  return record.read(redis.call('GETRANGE', tag .. ':req:' .. request_id, 0, 1023))
end

-- Returns the text of a record, to which the body is appended.
function record.head(r)
  local kind = r.detached and record.DETACHED or record.WHOLE
  return struct.pack(record.LAYOUT, kind, r.attempts, r.priority, r.submitted, r.deadline,
    r.run_ms, r.environment, r.client, r.affinity, r.second_affinity, r.lost, r.tenant, r.digest)
end

function record.body_key(request_id) return tag .. ':body:' .. request_id end
