-- Who is the reaper: one worker at a time, for a while, by the server's clock. Answers 1 to the one it is.
-- KEYS reaper ; ARGV me, while_ms
local now = redis.call('GET', KEYS[1])
if now == ARGV[1] then
  redis.call('PEXPIRE', KEYS[1], ARGV[2])
  return 1
end
if now then return 0 end
redis.call('SET', KEYS[1], ARGV[1], 'PX', ARGV[2])
return 1
