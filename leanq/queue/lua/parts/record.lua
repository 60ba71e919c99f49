-- each call: record.last = nil
-- The record of a request in flight: one string, which its reply replaces. It holds the kind of
-- record, attempts that have ended, priority, submitted (ms), deadline in the queue (ms, 0: none),
-- longest run (ms), environment, client, the stronger and the weaker affinity, tenant, digest, and the
-- body as the client packed it. The body of a detached request is in :body:ID, since Lua hashes each
-- text that it is given; its record ends with the body's size. leanq/queue/results.py reads the same
-- layout.
local record = {LAYOUT = '>BBBdddssssss', WHOLE = 1, DETACHED = 2}

-- The record in a text by its fields, `body` being where the body begins; nil where the text is
-- something else.
function record.read(text)
  local kind = text and string.byte(text)
  if kind ~= record.WHOLE and kind ~= record.DETACHED then return nil end
  local whole, _, attempts, priority, submitted, deadline, run_ms, environment, client, affinity,
    second_affinity, tenant, digest, body = pcall(struct.unpack, record.LAYOUT, text)
  -- Any process may have written it, and an error would end the call for all its requests.
  if not whole then return nil end
  return {attempts = attempts, priority = priority, submitted = submitted, deadline = deadline,
    run_ms = run_ms, environment = environment, client = client, affinity = affinity,
    second_affinity = second_affinity, tenant = tenant, digest = digest, body = body,
    detached = kind == record.DETACHED}
end

-- As above, for records that are read one after another: those that differ in nothing but their bodies, as
-- most of one batch do, have one table, to which the caller adds nothing of a single request.
function record.read_next(text)
  local last = record.last
  if last and text and string.sub(text, 1, last.body - 1) == last.head then return last end
  local r = record.read(text)
  -- Digests are as many as requests.
  record.last = r and r.digest == '' and r
  if record.last then r.head = string.sub(text, 1, r.body - 1) end
  return r
end

-- The record of a request, without its body; nil where there is none.
function record.load(request_id)
  return record.read(redis.call('GETRANGE', tag .. ':req:' .. request_id, 0, 1023))
end

-- The text of a record, to which the body is appended.
function record.head(r)
  local kind = r.detached and record.DETACHED or record.WHOLE
  return struct.pack(record.LAYOUT, kind, r.attempts, r.priority, r.submitted, r.deadline,
    r.run_ms, r.environment, r.client, r.affinity, r.second_affinity, r.tenant, r.digest)
end

-- Where the body of a detached request is.
function record.body_key(request_id) return tag .. ':body:' .. request_id end
