-- How much of the memory budget is used. A change of level is an event, once, whoever asks; a level is left only when
-- the use has fallen well below its beginning.
-- KEYS memory, events ; ARGV events_max, budget, share that is high, share that is full
local used, budget = memory_use(ARGV[2], KEYS[1])
local RANK = {ok = 0, high = 1, full = 2}
local function level_at(share)
  if share >= tonumber(ARGV[4]) then return 'full' end
  return share >= tonumber(ARGV[3]) and 'high' or 'ok'
end
local share = budget > 0 and used / budget or 0
local before = redis.call('GET', KEYS[1]) or 'ok'
local level = level_at(share)
if RANK[level] < RANK[before] then level = level_at(share + 0.05) end
if level ~= before then
  -- A server that is full to the brim refuses the note; then the next one to ask makes it.
  local noted = redis.pcall('SET', KEYS[1], level)
  if type(noted) == 'table' and not noted.err then
    emit(KEYS[2], ARGV[1], 'redis.memory', {level = level, used_bytes = used, budget_bytes = budget})
  end
end
return {level, used, budget, before}
