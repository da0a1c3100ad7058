-- What waits for a node that has free places, in the order in which it would take it.
-- KEYS waiting ; ARGV node as JSON, most, rollouts of each run to look at ('' for few)
if redis.call('EXISTS', KEYS[1]) == 0 then return {} end
return choose(KEYS[1], cjson.decode(ARGV[1]), tonumber(ARGV[2]), tonumber(ARGV[3]) or LONGEST_LOOK)
