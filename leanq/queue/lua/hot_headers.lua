#!lua flags=no-writes
-- parts: clock hot
-- hot_headers: the texts of the first `most` headers of a fingerprint by their ranks, without those that fewer
-- than `least` texts had.
local found, hashes, texts = {}, hot.ranked(fingerprint)
for _, hash in ipairs(hashes) do
  local text = #found < most and texts[hash] >= least and redis.pcall('HGET', tag .. ':texts:' .. fingerprint, hash)
  if type(text) == 'string' then found[#found + 1] = text end
end
return found
