python3 bench/gpu_rounds.py --cells "glm12:0,3" --batch 1,8,32,64 --repeats 1 --new-tokens 64 --bare --tensor-parallel 2 --expert-parallel --seconds ${S:-110} --out $OUT/glm12_ep.json
