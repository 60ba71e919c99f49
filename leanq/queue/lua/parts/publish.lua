-- parts: record
-- arguments: reply_ttl_ms
-- each call: publish.inboxes = {}
-- Replies: each takes the place of its request's record and is told to its client's inbox, in one
-- stream entry per client and call. Of large replies the inbox has the size alone, and the client fetches
-- them by request id, which costs less than a second copy. A client that reads its inbox extends the
-- time-to-live that the first entry gives it.
-- A reply is a text or, where its worker has uploaded it, a table: the `key` where it is, its `bytes`.
local publish = {}

function publish.send(client)
  local inbox, fields = tag .. ':inbox:' .. client, publish.inboxes[client]
  if not redis.call('XADD', inbox, 'NOMKSTREAM', '*', unpack(fields)) then
    redis.call('XADD', inbox, '*', unpack(fields))
    redis.call('PEXPIRE', inbox, reply_ttl_ms)
  end
  publish.inboxes[client] = nil
end

-- An uploaded reply; nil where the server has none there.
function publish.uploaded(key)
  local bytes = redis.call('STRLEN', key)
  return bytes > 0 and {key = key, bytes = bytes, moves = true} or nil
end

function publish.size(reply) return type(reply) == 'table' and reply.bytes or #reply end

-- What an inbox has of a reply.
function publish.told(reply)
  if type(reply) == 'table' then return reply.bytes end
  return #reply <= LARGE_BYTES and reply or #reply
end

-- Writes a reply under a name. An uploaded one moves there the first time, and is copied from then on.
function publish.write(name, reply, ttl_ms)
  if type(reply) ~= 'table' then return redis.call('SET', name, reply, 'PX', ttl_ms) end
  if reply.moves then
    redis.call('RENAME', reply.key, name)
    reply.key, reply.moves = name, false
  else
    redis.call('COPY', reply.key, name, 'REPLACE')
  end
  redis.call('PEXPIRE', name, ttl_ms)
end

-- A reply for one client; it is told when the call ends.
local function tell(request_id, client, reply)
  local fields = publish.inboxes[client]
  if not fields then fields = {}; publish.inboxes[client] = fields end
  fields[#fields + 1] = request_id
  fields[#fields + 1] = publish.told(reply)
  if #fields >= 4000 then publish.send(client) end
end

-- The reply in the place of the record, for its client or clients (see hand_over.lua).
function publish.reply(request_id, client, reply)
  publish.write(tag .. ':req:' .. request_id, reply, reply_ttl_ms)
  if not string.find(client, ' ', 1, true) then return tell(request_id, client, reply) end
  for name in string.gmatch(client, '%S+') do tell(request_id, name, reply) end
end

-- Ends a request, whose record is r, with a reply.
function publish.finish(request_id, r, reply)
  redis.call('HDEL', tag .. ':phase', request_id)
  if r.detached then redis.call('UNLINK', record.body_key(request_id)) end
  publish.reply(request_id, r.client, reply)
end

-- Ends a request with a verdict that is not Lean's, in the wire format of version 1.
function publish.verdict(verdict, reason, attempts, queued_ms)
  return cmsgpack.pack({'', 1,
    {verdict = verdict, reason = reason, attempts = attempts, queued_s = queued_ms / 1000}})
end

function publish.all()
  local clients = {}
  for client in pairs(publish.inboxes) do clients[#clients + 1] = client end
  for _, client in ipairs(clients) do publish.send(client) end
end
