-- each call: record.last = nil
-- The record of a request in flight: one string, which its reply replaces. It begins with numbers: the
-- layout's version, the kind of record, attempts that have ended, priority, submitted (ms), deadline in the
-- queue (ms, 0: none), longest run (ms). Texts follow: environment, client, the stronger and the weaker
-- affinity, lost attempts (see requeue.lua), tenant, digest, body.
-- The client packed the body. A detached request's body is in :body:ID, since Lua hashes each text that it
-- is given. Its record ends with the body's size. The file leanq/queue/records.py reads the same layout.
-- Another layout gets the next version, below 128. Its release also reads the one before, and writes each
-- record back in the layout that it had.
local record = {VERSION = 3, LAYOUT = '>BBBBdddsssssss', WHOLE = 1, DETACHED = 2}

-- Returns the fields of a record's text, with `body` as the place where the body begins; nil for other
-- texts.
function record.read(text)
  if not text or string.byte(text) ~= record.VERSION then return nil end
  local whole, _, kind, attempts, priority, submitted, deadline, run_ms, environment, client, affinity,
    second_affinity, lost, tenant, digest, body = pcall(struct.unpack, record.LAYOUT, text)
  -- Any process may have written it, and an error would end the call for all its requests.
  if not whole then return nil end
  return {attempts = attempts, priority = priority, submitted = submitted, deadline = deadline,
    run_ms = run_ms, environment = environment, client = client, affinity = affinity,
    second_affinity = second_affinity, lost = lost, tenant = tenant, digest = digest, body = body,
    detached = kind == record.DETACHED}
end

-- Returns the version of a record that record.read cannot read, 0 for a damaged one; nil for a reply, and
-- where there is no text. A reply's first byte is 128 or more.
function record.other_version(text)
  local version = text and (string.byte(text) or 0)
  if not version or version >= 128 then return nil end
  return version == record.VERSION and 0 or version
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

-- Returns the record of a request without its body; nil if there is none. If another release wrote it, the
-- second value is its version, as record.other_version says it.
function record.load(request_id)
  local text = redis.call('GETRANGE', tag .. ':req:' .. request_id, 0, 1023)
  local r = record.read(text)
  return r, not r and record.other_version(text ~= '' and text) or nil
end

-- Returns the text of a record, to which the body is appended.
function record.head(r)
  local kind = r.detached and record.DETACHED or record.WHOLE
  return struct.pack(record.LAYOUT, record.VERSION, kind, r.attempts, r.priority, r.submitted, r.deadline,
    r.run_ms, r.environment, r.client, r.affinity, r.second_affinity, r.lost, r.tenant, r.digest)
end

function record.body_key(request_id) return tag .. ':body:' .. request_id end
