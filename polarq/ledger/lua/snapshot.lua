-- Reads a task and its rollouts as one consistent picture.
-- KEYS task ; ARGV stem, with_request
local task = KEYS[1]
local num = redis.call('HGET', task, 'num')
if not num then return {} end
local fields = redis.call('HGETALL', task)
local picture = {}
for i = 1, #fields, 2 do
  if fields[i] ~= 'request' or ARGV[2] == '1' then
    picture[#picture + 1] = fields[i]
    picture[#picture + 1] = fields[i + 1]
  end
end
local rollouts = {}
for i = 0, tonumber(num) - 1 do rollouts[i + 1] = redis.call('HGETALL', ARGV[1] .. i) end
return {picture, rollouts, now_ms()}
