"""The Hopper forward kernel: persistent, warp-specialised, TMA and asynchronous wgmma, in Gluon.

    partition        warps   does
    _compute x 2..4  4 each  owns 64 query rows of the tile: products, online softmax, lse, and the TMA store of out
    _load            1 or 4  takes tiles from a counter, tells them to the others, starts every load

A tile is 64 queries a consumer, of one head; where queries are few, of all heads of a group (HEADS of them, their queries of
one position side by side), which have their keys in common: see `tiles.hopper_config`. K and V are one unbroken stream of
steps over all tiles of a program (K of step i+1 is loaded before V of step i, also from one tile to the next); a step is a key
tile, and goes to all consumers:

    scores(i) = q kᵀ(i)  |  acc += p(i-1) v(i-1)      both in flight together
    p(i), row_max, row_sum = online softmax(scores(i)) under the second product

Key tiles go from the last to the first, so that the one that a causal mask cuts is the first of a consumer, outside the loop.
At the end of a tile a consumer starts the first scores of its next tile with its last product, does that first softmax, and
only then writes out. Steps that only other consumers need are handed back unused. Consumers take turns in issuing products,
so that the softmax of one runs under the products of another; the turn goes through barriers of the hardware.

Head dim 256 (LAZY): acc is rescaled only when weights would exceed 256, which after a few steps hardly happens: 128 products a
thread and step less, in time and in power. Shared memory is what runs short, its bandwidth and its size. The left half of the
queries is an operand in registers, so q kᵀ reads less of it. The buffer of the left half is free once it is read, and takes
the left half of out at the end of the tile before; the right half leaves through that of its own queries.

Schedule: tiles in the order of `schedule.tile_of_unit`, each to the program that is free first (an atomic counter in global
memory, asked while the last loads of a tile are under way; it is 0 again when the kernel ends). A packed call has a table of
its tiles, which a small kernel writes before (`schedule.plan_packed`).

Keys and values may lie in the pages of a cache, see kvcache.py: then a box of TMA is one page or a part of it, and tokens of
other pages are copied one by one (GATHERED).

Takes fp16 and bf16, head dims to 256 (what a block has beside is zeros, or not loaded, and no part of products: boxes.py,
device/columns.py), every mask and score option, dropout, packed calls. Refuses other dtypes, and strides that TMA does not
take: see `hopper.refuses`.

ALiBi, where it is a difference of positions (keys up to the diagonal, head dims to 128): a product more (`_bias_operand`).

Softcap (BOUNDED: bf16, up to 55, without ALiBi): its logits have a bound, so weights are relative to 0 instead
of the row's largest logit, and there are no maxima, no corrections, and nothing that scales acc. Tanh is a polynomial
(`scores.capped`). Weights are then rounded to bf16 where the largest of a row was 1: out is off by 2.0e-3 to 2.4e-3 (root mean
square, relative to float64), where it was 1.7e-3 to 2.1e-3, since bf16 of out alone is 1.65e-3.

Dropout: the random words of a step are made under its products, and of those only a bit a weight is kept (`dropout.keep_bits`).

Calls of up to 272 keys have mostly another kernel, which has no border: resident.py.

What limits it (times in benchmarks/results/nvidia-h200/paper-forward.json; counters in attention-counters.json, FA3's in
forward-counters.json, both of earlier kernels):
- long sequences: the tensor pipe, active 98% of the cycles at head dim 256 full and 95% causal, 84% and 82% at 128 (8192 keys;
  FA3 96%, 95%, 86% full; before LAZY 84% at head dim 256 causal), and then the power limit (1.5 to 1.6 GHz).
- by the clock in the loop: a step takes 2058 clocks at head dim 256 full, 2153 causal (2400 before LAZY), 2400 at head dim 128
  with both; the products take 2048. All programs alike within 1%, so it is the consumers' loop, neither memory nor schedule.
  Which order of exponentials, sums and corrections ptxas chooses for code that says the same moves a step by 300 clocks.
- ptxas moves the wait for p v above the exponentials, so that they do not run under it, but only under the products of other
  consumers: 1024 clocks at head dim 128, of which the chain of a softmax is about 750.
- shared memory at head dim 256, by arithmetic: a step of 64 keys takes 2048 clocks of the tensor pipe, and 2048 of 128 bytes
  from shared memory (1792 with half of the queries in registers; with FA3's tiles of 80 keys, which Gluon's powers of two do
  not allow, 95% of its clocks).
- head dim 128, where the 2340 clocks of a consumer's step go, by samples of its instructions (full, 8192 keys, single run; two
  consumers, so products take 2048): up to the first product 173, of which 50 are the barrier before the wait for keys and the
  way back to the loop's begin, 25 the wait's own latency; q kᵀ issued 145; the wait for values 46, of which 40 are its latency;
  p v issued 268, since operands in registers take 25 each where others take 16; the wait for q kᵀ 199; maxima, the first of
  two rows', to the first exponential 308; exponentials 1100, where units of their own would take 530; acc scaled 99. So a
  consumer waits for the tensor pipe for 9% of its time only, but to take clocks out of its chain did not make it faster: see
  below. At every issue, 0.9 other warps are held back at dispatch, 0.15 by the queue to the exponentials' unit (head dim 64:
  1.0 and 0.7).
- head dim 64: exponentials take as long as products: their unit is busy 65% of the time, the tensor pipe 63%, issue slots 54%.
- a border by the clock, causal 1024 keys, where it takes a third of the time: head dim 128 3980 clocks (received 200, its keys
  and queries there 670, products started 1380, first softmax done 2700, p v done 2710, out scaled 3160, in shared memory 3510,
  stored 3720), in which products take 1024; both consumers are in it at once. Head dim 256 10800, of which 1750 are a wait for
  the second keys of the next tile, and 2200 one for the store. Head dim 64, 4 consumers: the first waits 6400 for the others,
  which have more steps of a causal tile, since they take turns.

What helped (H200, bf16, 16k tokens, TFLOP/s, before to after in single runs, not recorded under benchmarks/results; in brackets
cuDNN and FA3 beside it, each once):
- turns by bar.sync and bar.arrive instead of an mbarrier, whose arrival waits for 128 threads first. Head dim 128: 8192 keys
  641 to 673 (608, 678), causal 606 to 637 (516, 671). Head dim 64: 8192 keys 517 to 540, causal 1024 keys 354 to 361.
- head dim 256, these turns, half of the queries in registers, and two tiles of queries in halves instead of three for two
  consumers, so that no consumer waits for the store of another: 8192 keys 686 to 726 (624, 718), causal 615 to 634, causal
  512 keys 333 to 368 (340, 336).
- head dim 256, p v as four products beside that, the turn passed before the last: causal 8192 keys 634 to 655 (540, 720). At
  head dim 128 equal, at 64 3% slower; as two products at head dim 256 half of it.
- head dim 256 causal, the wait for p v held below the exponentials by an instruction that needs the row sums: 8192 keys 637 to
  681 (527, 706), 1024 keys 470 to 487 (400, 453). With it one product for p v is better than four. Elsewhere it is slower: full
  734 to 673, head dim 128 667 to 612, causal 639 to 615; head dim 64 529 to 519, causal 512 to 463.
- head dim 256, acc rescaled only where a maximum grew by much, beside that: causal 8192 keys 661 to 709 (522, 707), causal 1024
  549 to 563, 512 keys 612 to 622, 8192 keys 758 to 751 (636, 724); four products for p v, or sums in parts: 1% slower. In a
  burst too short for the power limit both are equal (732 and 727, FA3 731): what it saves is power. At head dim 128, where
  these products hide under the exponentials, 645 to 639 causal, 674 to 648; at 64 524 to 512, 551 to 533.
- lse stored after the fence that out needs, which waits for it: head dim 64 causal 512 keys 281 to 286, 1024 359 to 367; 256
  causal 512 388 to 392; elsewhere equal.
- head dims 64 and 128, a row's sum in eight parts until the end, maxima of 128 keys in two times as many chains: head dim 64,
  8192 keys 527 to 543, causal 510 to 519, causal 2048 414 to 431; head dim 128, 512 keys 545 to 567, causal 1024 464 to 485,
  8192 equal (662 and 657, causal 632 and 633). Head dim 256: full 753 to 685, causal equal.
- products without columns of zeros (us): 192/128 causal 1089 to 995, full 2136 to 1901; 160 causal 1294 to 1126; 96 760 to 734.
- packed calls, groups of heads of equal size: 2 x 8192 keys of 16 heads, causal, 901 to 839 us (dense 790).
- packed calls whose queries and keys have one tensor of starts, so that the diagonal lies where queries begin: one tile
  of a consumer is masked, and up to 2048 keys the first half of a tile stands alone. us, causal, 16 heads, 2 x 8192 906 to 881
  (dense 868), 16 x 1024 161 to 155 (145), of mixed lengths 184 to 174; 32 heads of dim 64 1161 to 1117 (1098), 16 x 1024 216 to
  199 (188); 8 heads of dim 256, 16 x 1024 147 to 147 (135).
- one loop over key tiles, masked where it must be, instead of three: from one loop to the next LLVM carries the halves of p one
  by one, which is 64 PRMT of 520 instructions in each step. us, causal, 2 x 8192 keys: packed head dim 64 1212 to 1059, 128 822
  to 799, 256 775 to 710; an unaligned diagonal (8000 queries, 8200 keys) 911 to 831; a window of 1024 of 16k keys 288 to 279,
  head dim 64 483 to 434. Dense calls, which have no such masks, are equal.
- 192/128 with tiles of 128 keys, which fit where the last 64 columns of q and k lie apart (`rest_apart`): causal 1002 to 919
  us, full 2100 to 1840, packed 1090 to 1019.
- two consumers, head dim 128, the wait for p v held below the maxima and a quarter of the exponentials (`softmax._hold`), where
  ptxas puts it between the maxima; us, each of 10 to 12 shuffled rounds, FA3 in brackets: 2 x 8192 causal 871 to 857 (829),
  full 1666 to 1645 (1619), 16k causal 1721 to 1680 (1631); 8 x 2048 causal 268 to 261 and 252 to 254 (267, 251); 192/128
  causal 1031 to 999, full 1936 to 1894; 32/4 heads 1678 to 1640; head dim 96 causal 418 to 411, full 780 to 787; a window 263
  to 260. Held below the maxima alone 903 of 907, full 1717 of 1743 (half a quarter of the exponentials comes before by itself,
  as in FA3); below half of the exponentials 900, 1761; below all (see LAZY) 6% slower. With a softcap 1143 to 1225, with
  dropout 674 to 678; at head dim 64 with 3 consumers causal 4% slower: not there.
- there, the wait for p v held below the corrections' exponentials too: ptxas put these last of all exponentials, and so the 64
  multiplications of acc behind everything, 130 of a step's 2400 clocks by samples; now they stand between exponentials, as in
  FA3. Time before over after, median of 9 to 11 shuffled rounds, two runs: 2 x 8192 causal 1.006 and 1.010, full 1.020 and
  1.005, 16k causal 1.012 and 1.014, full 1.010 and 1.005, 4 x 4096 causal 1.007, to 1024 keys 1.00; head dim 96 causal 1.022,
  full 1.033; ALiBi 1.018; a window 1.00; 192/128 0.99. Below corrections alone, so without a quarter of the exponentials: full
  1.016 and 1.010, a window 1.012, causal 1.00. With dropout 0.97, with a softcap 0.985; head dim 64 with 3 consumers causal
  0.96, full 0.995.
- head dims 136 to 192: no boxes of zeros are loaded, so that all multiprocessors take as long: 1.0 to 1.5 times as fast, see
  boxes.py.
- dropout by 15 bits a weight instead of 32, and two weights at once as they are packed for the product; us, 4 x 4096 tokens of
  16 heads, in brackets cuDNN and SDPA's flash. Head dim 64 full 1580 to 1080 (1490, 1220), of which 4 consumers instead of 3
  are 500; causal 780 to 626 (826, 677). 128 full 1570 to 1190 (1850, 1960), causal 900 to 668 (1030, 1100).
- a softcap by polynomials, without exponentials, unless a warp has a score beyond 0.6 of it (`scores.logits`); us, 2 x 8192,
  causal, softcap 50: head dim 128 1420 to 1130 (790 without softcap), 64 1200 to 960; with scores beyond 1340 to 1410. Head dim
  256 958 and 966, so not there. With one term more, and a maximum of magnitudes for the bits that tell, 128 1240, 64 1190.
- a softcap without maxima (BOUNDED), and a polynomial that needs no score in units of the softcap: x * (a + b * v), v = x * x
  + c, whose bits tell whether x is within 0.115 of it, since c makes their exponent one; beyond, 0.6 and exponentials as
  before. 472 instructions a step of head dim 128, where there were 870, and 454 without softcap. H100, us, softcap 50, medians
  of 7 shuffled rounds, in brackets without softcap: causal 2 x 8192 head dim 128 1234 and 1252 to 892 and 902 (799, 804; in
  another run 1190 to 843, 785), 64 956 to 626 (492), 256 of 8 heads 1090 to 782 (747); full 4 x 2048 299 to 229 (206); fp16,
  which keeps maxima, 1238 to 1110 (812). Scores to 0.26 of the softcap 1231 to 1185, to 0.5 1216 to 1184, beyond 1486 to 1470;
  head dim 64 972 to 890, beyond 1236 to 1256; 256 1130 to 962, beyond 1059 to 1041. A third term, up to 0.32 of the softcap
  (536 instructions): 927 to 938 instead of 892 to 902, but 926 where scores reach 0.26, 256 777 and with scores to 0.5 806
  instead of 962. Tests of a quarter of a step's scores at a time instead of half: 875 instead of 843 in that other run, full
  228 instead of 218; of all at once equal (892), but at head dim 64 it spills 49 times a step. Head dim 64 with 3 consumers of
  128 keys 829 instead of 626. Both terms from registers of the warp: 45 copies a step.
- that softcap with masks in the loop, packed, with sinks and with dropout, where it was with maxima; H100, us, softcap 50,
  medians of 5 shuffled rounds, before, now, in brackets without softcap, head dims 64, 128, 256 (16, 16, 8 heads): a window of
  4096, 2 x 8192, 924, 925, 753 to 613, 665, 598 (400, 586, 552), and with a step behind the loop for the tile that its edge
  cuts 488, 655 (a window of 1024 239, 273, where it was 381, 372; without softcap 179, 224); packed causal 4 x 4096 609, 596,
  480 to 399, 440, 399 (297, 415, 377); sinks causal 2 x 8192 892, 1138 to 591, 824 (509, 766); dropout 4 x 2048 549, 469, 320
  to 385, 357, 281 (296, 321, 272); fp16, a window of 4096, 898 to 785 (610).
- one warp that loads, not four: Triton puts a barrier of the partition's threads before each load of TMA, which for one warp
  is no instruction. H100, us, medians of three processes in turn, 16k tokens: head dim 64 causal 512 keys 149.2 to 140.9, 1024
  218.8 to 208.1, full 1024 345 to 339; 128 causal 1024 138.3 to 135.6, 2048 227.9 to 223.2, 8192 788 to 768, full 1024 219.1
  to 214.9, 8192 1542 to 1523; 256 0.985 to 1.01 times as fast; a window of 1024 of 16k keys 254.2 to 245.8, packed 16 x 1024
  158.5 to 153.0, head dim 64 429.5 to 416.1, 227.6 to 219.1; ALiBi, head dim 64, 1024 keys 214 to 197. Not with 3 consumers,
  whose causal 8192 keys went from 1126 to 1152 and 1005 to 1027 (four warps behind the consumers 1140, so it is the order: the
  first warps are served first, by all signs), nor with 4 and dropout (608 to 647): there four warps load before all others
  (`arguments._load_first`). Registers of three consumers 152 instead of 160: 1.7 times as slow.
- causal, up to 2048 keys: where an aligned diagonal shows the first of two consumers half of its first key tile, it has scores
  and softmax of 64 keys there; the same bits. us, 16384 tokens, two runs of 9 shuffled rounds: head dim 128 512 keys 94.0 and
  95.9 to 90.5 and 92.3 (cuDNN 102, 105), 1024 141.3 and 145.8 to 137.6 and 141.2 (165, 173), 2048 240.6 and 246.3 to 238.3 and
  241.9; 1024 keys of head dim 96 133.6 to 130.1, of 192/128 186.5 to 174.5. With more keys nothing or less than that: 4096 444
  and 445, 8192 834 and 843, 16384 1626 and 1650; 192/128, 8192 keys 487 and 486. With a softcap 322 to 351, with ALiBi 253 to
  266, so not there; why is not known.
- windows of whole halves of a tile (1023 or 1024 keys to the left): the tile that the left edge cuts has a step of its own
  behind the loop, which has no mask then; the half tiles at both ends, one of each consumer, stand alone, whatever the length;
  a mask has one comparison an element, not two, in only the half of a tile that an edge cuts. All the same bits. By the clock
  in the kernel a tile of a window of 1024 takes 26,620 clocks before, 23,930, and 23,080 with masks of half a tile (a full
  step takes 2,414). H100, us, medians of 8 or 9 shuffled rounds, two runs without masks of half a tile, where the same code
  differs by 4%: 1024 of 16k keys 276 to 248, 260 to 250; 256 130 to 118, 134 to 123; 512 173 to 161, 174 to 162; 4096 779 to
  698, 778 to 709; (127, 128) of 8k 72 to 66, 73 to 68; 32/4 heads 515 to 459; head dim 64 239 to 213, 229 to 218; 96 256 to
  242; 192/128, 8192 of 32k equal; with a softcap and maxima equal. The step behind the loop alone 248 of 276, of 256 keys
  128 of 130, and with half of it 123; the first half alone 262 of 276. What is left of the 23,080 beside 8 steps is the
  border, where both consumers wait for the one with the whole first tile: received 460, its turn 350, products started 820,
  softmax 1340, out stored 1050, back in the loop 460.
- ALiBi where no key right of the diagonal is seen: a product of 16 columns more adds slope times the key's place in its tile
  (the slope in three parts of bf16; places are exact), and the softmax a number a row: 14 instructions a step beside those
  without ALiBi, where there were 98. us, in brackets without ALiBi: 2 x 8192 head dim 128 960 to 876 (891), 64 1280 to 1101
  (1101), 96, 4 x 4096, 476 to 433 (434); 16 x 1024 179 to 168 (149: half tiles and buffers for out, which ALiBi has not). It is
  the last product: as the first, lse of two of 1,000 random configurations was off by 1.1 and 1.6 times its bound, by an
  emulation that cuts sums to 24 bits at each 16 columns, and 0.25 of it as the last.

Tried (the same: TFLOP/s of single runs, each interleaved with what it is compared to, not recorded):
- key positions of the mask from the start of the sequence instead of the tile's first: causal 512 keys, head dim 128: 325
  instead of 353. An addition an element, in the one tile that nothing hides.
- tiles dealt in a fixed order instead of by the counter: causal 2048 keys, head dim 128 / 256: 505 / 503 instead of 535 /
  560; each consumer computing its tile from the number instead of being told: 3 to 8% slower again; tile numbers by shifts
  instead of divisions: equal.
- the counter asked with a scalar atomic at the last step (instead of a tensor atomic that nothing waits for): causal 512
  keys, head dim 64 / 128 / 256: 184 / 272 / 327 instead of 212 / 309 / 338; two steps before the end instead of one: no
  change.
- l2_bytes of 4, 8, 12, 20, 30, 40 MiB: within 3% from 2048 keys on; 80 MiB slower; at 512 keys 4 MiB is 6% slower than 20.
- packed calls, the next tile asked for when a tile begins, since the table takes as long to read as the number, and the table
  in the order of tiles, so that less is left to compute: 2 x 8192 keys 839 to 879 us; asked for a tile earlier still 939 (16 x
  1024 keys 155, 158, 169). A program that asks early takes a tile that another would begin before: a simulation of the order
  alone says 4% and 3%.
- head dim 192/128 with a row's sums in parts and acc rescaled in each step: causal 995 to 1017 us, full 1901 to 1878.
- head dim 96 with 3 consumers of 64 keys against 2 of 128 (us, 4 x 4096 tokens of 16 heads): 792 and 732, causal 449 and 412;
  with accumulators of 64 and 32 columns 795, 436.
- head dim 64 causal with 4 consumers of 64 keys against 3 of 128: 439 / 368 at 2048 keys, 466 / 415 at 4096; 2 consumers of
  128 keys are slower than 4 at 512 and 1024 keys (209 / 267, 312 / 364 causal).
- without turns: at head dim 128 equal (8192 keys 669 and 673, causal 636 and 638); with half of the queries in registers at
  head dim 256, in another run: 628 instead of 749.
- the wait for p v held below the exponentials by a branch (the wait for the next values): 2 to 12% slower at all head dims;
  the turn passed between q kᵀ and p v beside that: equal to it.
- head dim 256 causal, which falls behind FA3 from 4096 keys on: key tiles after the diagonal in rising order; 4, 9 and 40 MiB
  for l2_bytes; consumers with their rows exchanged; the first key tile masked instead of skipped: all equal, 636 to 648 at 8192
  keys. Full calls whose programs each begin at another key tile, so that L2 merges no requests and answers twice as many: equal
  (717 and 714).
- the softmax scale in a register of each thread, where ptxas keeps it in one of the warp, since all lanes have the same: us,
  head dim 128, 512 to 8192 keys causal 92.8 to 93.0, 142 to 146, 443 to 458, 839 to 872, 8192 full 1661 to 1689; 64 causal
  1076 to 1104, 256 causal 768 to 796. By a micro-benchmark a multiply-add issues every clock with either, a maximum every two.
- acc rescaled only where a maximum grew by much, at head dims 64 and 128, beside the held wait: us, 128 causal 8192 839 to 879,
  512 92.8, full 8192 1661 to 1687; 64 causal 8192 1076 to 1124; 96 full 795 to 788.
- one loop over all steps of a program, those of borders too, with a branch for what comes before a tile and one for what comes
  after, so that a consumer goes through 1,060 instructions and not 1,200 to 1,400: the same bits; us, 128 causal 512 keys 88 to
  95, 1024 143 to 156, 8192 860 to 957, full 512 143 and 143, 8192 1657 to 1744, a window of 1024 of 16k 273 to 299; 64 causal
  8192 1069 to 1230, full 2065 to 2210. Weights are then packed under the next turn; packed before it, by an instruction that
  can't move, 1840 instead of 1744.
- head dim 64, two programs to a multiprocessor, so that one's border runs under the other's steps: two consumers of 64 keys
  with 104 registers, where p and the next scores side by side take 110, so the products of a consumer one after the other,
  without turns. us, causal 512 keys 124 to 117, but full 512 166 to 170, causal 1024 183 to 190, 2048 311 to 340, full 8192
  2009 to 2430: four consumers that hide each other's waits are no substitute for products in flight under a softmax.
- a window of 1024 of 16k keys, head dim 128, as it was before the tile that its edge cuts left the loop (see above): 254 us
  where plain causal takes 1606, so 1.31 of its visible work (1.43 where both take turns at the power limit; now 1.31 there).
- there, and not kept (H100, us, as above, 248): tiles in rising order, and 1, 4, 8, 16 heads to a group, 245 to 256; keys and
  values of one head for all, so that they come from L2, 230 (before 265 of 276), and full calls of as many tiles, 9 steps
  each, without a mask 247, all from L2 237: memory is not what is missing. Key tiles half a tile further left, so that
  consumers have their half steps, and borders, one after the other: 23,980 clocks a tile instead of 23,080, of 256 keys 11,510
  instead of 10,030. Consumers with their rows exchanged, so that the one with a whole first tile has its turn first: 22,780,
  of 256 keys 10,090, with the same bits; medians of 9 shuffled rounds of another run: 1024 of 16k 232.7 to 230.5, 256 105.6 to
  105.0, 4096 776 to 772, causal 512 103.6 to 104.0, 1024 134.5 to 134.6, 2 x 8192 855 to 837, full 8 x 2048 411 to 408, but
  head dim 64 causal 1024 188 to 196, 256 133 to 137.
- head dim 128 with 3 consumers of 64 keys (4 or 3 stages) against 2 of 128, which have longer chains (us, 9 shuffled rounds):
  softcap causal 2 x 8192 1149 to 1159, 1200, full 4 x 2048 278 to 346, 322; a window of 1024 of 16k keys 244 to 250, 255;
  causal 8192 757 to 793, 784, 1024 133 to 162, 161; ALiBi 758 to 806, 810.
- one exponential in 16, 8 or 4 by a polynomial of degree 4 on the FMA pipe, as FA4 does on Blackwell: head dim 128 causal
  633 to 605, 579, 555, head dim 64 513 to 478, 467, 430; degree 3 is equal. Issue slots are as short as units for exponentials.
- the correction of acc made to wait for the row sums (a selp no one takes), so that ptxas puts exponentials before the
  rescaling, as it does by itself at head dim 256 full: head dim 256 causal 669 to 684, full 753 to 737; head dim 128 causal 650
  to 633.
- head dim 256, out stored by the producer, for which no consumer waits, and the next tile asked for two steps earlier: full 512
  keys 613 to 628, causal 395 to 379, 1024 560 to 548 (in a state that still gave wrong results; not followed up).
- what a consumer does between two products made shorter, at head dims 128 and 64, where that is what it waits for (us, seven
  shuffled rounds): maxima by integers, which compare as floats do unless both are negative, and three at once in the time of
  two: with a vote for rows whose scores and maximum so far are all negative, full 16384 keys 3436 to 3408, head dim 64 4150 to
  4096 and 1077 to 1066 (4096 keys), causal 1748 to 1756 and 2118 to 2151, 192/128 503 to 529. No maxima: exponentials relative
  to the last reference, and a vote whether one exceeds it by 8, by integers too, a quarter of the exponentials before the vote:
  6% less instructions, 824 to 872, causal 444 to 467, head dim 64 1011 to 1187; with the wait for p v below a half,
  three quarters or all of them 872 to 908. By counters 1.3 and 1.6 warps an issue are then held back at dispatch instead of 0.9
  and 1.0, and the queue to the exponentials' unit holds 1.4 at head dim 64 instead of 0.7.
- exponentials of one consumer at a time, by barriers of their own: 829 to 843, head dim 64 1063 to 1108.
- values waited for before q kᵀ, so that p v follows it at once: 855 to 868, causal 463 to 465, head dim 64 1103 to 1113, causal
  609 to 624. Slots by masks and shifts instead of remainders, keys handed back together with values: equal to it.
- one of two consumers 600 or 1200 clocks late at every border: 16384 keys equal, causal and full; 2048 2 to 5% slower.
- the loop turned by half a step, so that the first products of a tile start before out of the last one is stored: scores and
  acc are then under way at the loop's edge, across which ptxas does not know that to wait for one of two groups is enough, and
  serialises all products (C7514); not if the wait is for both. Without turning it: the second step of a tile started, and
  waited for, before or under the store of the last tile's out (head dims up to 128, TFLOP/s without and with): 64 causal 512
  keys 285 to 211, 8192 560 to 492, full 8192 535 to 512; 128 causal 512 365 to 333, 8192 632 to 623, full 8192 647 to 632. That
  step waits for both of its products at once, the loop for one of two.
- the turn passed when q kᵀ is done, before the softmax: equal; when the maxima are known: 15 to 30% slower.
- keys and values handed back without the barrier of 128 threads that stands before an mbarrier's one arrival, in two of three
  places of a step: by arrivals of all threads (cp.async.mbarrier.arrive) 3 to 10% slower; by bar.arrive to a producer that
  waits in bar.sync equal, and 1% slower beside the held wait.
- 131,072 keys, where FA3 is 1.06 times as fast in features.json, and was 1.13 before the held wait; counters of a single run
  before it: bytes of DRAM and of L2 and its hits are FA3's, within 3% (98% hits); the tensor pipe is active 85% of the cycles,
  FA3's 90%: what is missing is in the step of a consumer.
- acc scaled not behind a softmax but between q kᵀ and p v of the next step, where products hide it: head dim 128 full 3.5%
  slower, causal 1.5%, 64 1.5%, 256 equal: the turn goes on later. A barrier of 128 threads before the wait for q kᵀ, where
  Triton has one behind it: -2% to 1%.
- the next step's keys waited for under the products of this one, so that a step begins with products: 0.5 to 4.5% slower at all
  head dims, with three stages of keys (in the memory that out has of its own) 2% at head dim 128; those three stages alone 0 to
  1.6% slower. Keys handed back together with values: 4 to 12% slower.
- short calls, where a program has one tile or two. Head dim 64, 8 x 256 keys of 16 heads, from a warm L2, 15,400 clocks: tile
  received 770, queries and keys there 2600, first softmax done 3230, 3 steps more 10500 (2400 each, 1800 in long calls:
  probably since the code of four consumers is read for the first time), border and store 14100. The first keys loaded before
  the queries: 16.8 to 16.4 us, 8 x 512 31.2 to 30.5, but 16 x 1024 causal of 32 heads 181.7 to 185.0, 32 x 512 causal 123.1 to
  123.6, head dim 128 equal. The first softmax of a tile that does not come left out by a branch: 16.4 to 16.2 us, full 512 keys
  of 32 heads 165.8 to 169.1, and wrong at head dims 128 and 256, without a warning of ptxas: probably it moves registers at the
  branch that the product under way writes. No counter where programs have one tile each: equal.
- 577 queries, whose third tile of 256 leaves two of four consumers without a row: 1.33 times the work (H100, 32 sequences of 16
  heads of dim 64, 158 us, cuDNN 151). They can't hand back the keys and values of a tile unused, as those that a mask sets back
  do with a few: they still have the values of their last step, whose product starts with the next tile's scores, and the stages
  are used up before the tile is. Not run.
- half of the queries in registers at head dim 128: equal (664 and 658, causal 625 and 623); all of them: 72 bytes of spills. At
  head dim 64 it does not fit, and ptxas serialises (C7512).
- head dim 256 with tiles of 128 keys, one stage: 288 bytes of spills, and ptxas serialises.
- (batch, heads, seqlen, dim) in memory instead of (batch, seqlen, heads, dim): equal counters; up to 5% at 8192 keys.

Source: Dao 2023, FlashAttention-2, algorithm 1; Shah et al. 2024, FlashAttention-3, algorithm 2.
"""

from typing import Any, NamedTuple

from flashtile.device import columns, masks, schedule, scores, softmax
from flashtile.device import dropout as dropouts
from flashtile.device.barriers import allocate_barriers
from flashtile.device.compat import (
    async_copy,
    fence_async_shared,
    gl,
    gluon,
    mbarrier,
    partition_barrier,
    tma_store_wait,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from flashtile.device.dropout import RandomStream
from flashtile.device.lengths import Lengths
from flashtile.device.masks import Window
from flashtile.device.numerics import NEG_INF
from flashtile.device.schedule import Order
from flashtile.hopper import boxes
from flashtile.hopper.arguments import bind_forward

# Query rows of a consumer: what one wgmma of 4 warps holds.
ROWS = gl.constexpr(64)
TILE_SLOTS = gl.constexpr(2)
# One of the hardware's 16 barriers a consumer, of those that Triton leaves alone: it counts 128 threads that pass the turn and
# 128 that wait for it.
_WAIT_TURN = gl.constexpr(tuple(f"bar.sync {8 + consumer}, 256; mov.u32 $0, $1;" for consumer in range(4)))
_PASS_TURN = gl.constexpr(tuple(f"bar.arrive {8 + consumer}, 256; mov.u32 $0, $1;" for consumer in range(4)))
# Passes $2 and $3 through, and can't be done before they are known. The bits are those of no number, so nothing arrives.
_HOLD = gl.constexpr(
    "{ .reg .pred q; .reg .b32 b; mov.b32 b, $2; setp.eq.u32 q, b, 0x7fffdead; vote.sync.any.pred q, q, 0xffffffff; "
    "@q bar.arrive 15, 128; selp.b32 $0, 0, $2, q; selp.b32 $1, 0, $3, q; }"
)
# Of the product that adds ALiBi's bias: the fewest that a product of bf16 has
BIAS_COLUMNS = gl.constexpr(16)
# batch, head, row_begin, begin, end, and of packed calls start_q, seqlen_q, seqlen_k
TILE_WORDS = gl.constexpr(8)


class Ring(NamedTuple):
    """Shared memory, in slots, and its barriers: x_ready when slot x is filled, x_free when it may be filled again."""

    q_smem: Any
    # What counts past the first columns, where that is apart: then q_smem has fewer slots than barriers
    q_rest_smem: Any
    k_smem: Any
    k_rest_smem: Any
    v_smem: Any
    # one a consumer; q_smem where that has to serve
    out_smem: Any
    # `_bias_columns`, where ALiBi's bias is added by a product
    bias_smem: Any
    tile_smem: Any
    q_ready: Any
    q_free: Any
    k_ready: Any
    k_free: Any
    v_ready: Any
    v_free: Any
    tile_ready: Any
    tile_free: Any


class LseRows(NamedTuple):
    """stride: from head to head. apart: of a packed call, what lies between two sequences beside the first's rows, or None."""

    ptr: Any
    stride: Any
    apart: Any


class Keys(NamedTuple):
    """Where the keys of a step are: of `boxes.place`; with pages the sequence, the slot of the first, and where slots end."""

    place: Any
    head: Any
    row: Any
    stop: Any


class Part(NamedTuple):
    """What a consumer, or all together, do of one tile: queries from row_begin on, key tiles [begin, end).

    head is the number of the group where its heads share the tile.
    """

    batch: Any
    head: Any
    row_begin: Any
    begin: Any
    end: Any
    # without hidden keys or keys past the end: [full_begin, full_end)
    full_begin: Any
    full_end: Any


@gluon.jit
def _slot(step, NUM_SLOTS: gl.constexpr):
    """(slot, phase of its ready barrier) of a step."""
    return step % NUM_SLOTS, (step // NUM_SLOTS) & 1


@gluon.jit
def _tile_part(unit, order, table, lengths, window, TILE_M: gl.constexpr, TILE_N: gl.constexpr):
    """The part of all consumers together, and the lengths of its sequence.

    At least one key tile, so that empty rows need no path of their own; an end of 0 says that there is no such tile.
    """
    LAST_FIRST: gl.constexpr = window.right is not None
    if table is None:
        exists = unit < order.total_heads * order.num_tiles
        work = schedule.tile_of_unit(unit, order, LAST_FIRST)
    else:
        exists = unit < order.num_tiles * order.num_heads
        work, lengths = schedule.packed_tile_of_unit(unit, order, table, LAST_FIRST)
    row_begin = work.tile * TILE_M
    tiles = masks.key_range(row_begin, lengths, window, TILE_M, TILE_N)
    end = gl.maximum(tiles.end, 1)
    begin = gl.minimum(tiles.begin, end - 1)
    end = gl.where(exists, end, 0)
    return Part(work.batch, work.head, row_begin, begin, end, 0, 0), lengths


@gluon.jit
def _consumer_part(part, lengths, window, HEADS: gl.constexpr, TILE_N: gl.constexpr, CONSUMER: gl.constexpr):
    """The part of one consumer. Rows past the length do what the last row does."""
    QUERIES: gl.constexpr = ROWS // HEADS
    row_begin = part.row_begin + CONSUMER * QUERIES
    tiles = masks.key_range(gl.minimum(row_begin, lengths.seqlen_q - 1), lengths, window, QUERIES, TILE_N)
    end = gl.minimum(gl.maximum(tiles.end, part.begin + 1), part.end)
    begin = gl.minimum(gl.maximum(tiles.begin, part.begin), end - 1)
    # Key tile end - 1 comes first, and is masked whatever it holds.
    full_end = gl.minimum(gl.maximum(tiles.full_end, begin), end - 1)
    full_begin = gl.minimum(gl.maximum(tiles.full_begin, begin), full_end)
    return Part(part.batch, part.head, row_begin, begin, end, full_begin, full_end)


@gluon.jit
def _publish(ring, part, lengths, index, WARPS: gl.constexpr, PACKED: gl.constexpr):
    """Tell the consumers the program's index-th tile; an end of 0 says that there is none."""
    slot, phase = _slot(index, TILE_SLOTS)
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    zero = gl.full([1], 0, gl.int32, layout)
    mbarrier.wait(ring.tile_free.index(slot), phase ^ 1)
    ring.tile_smem.index(slot * TILE_WORDS).store(zero + part.batch)
    ring.tile_smem.index(slot * TILE_WORDS + 1).store(zero + part.head)
    ring.tile_smem.index(slot * TILE_WORDS + 2).store(zero + part.row_begin)
    ring.tile_smem.index(slot * TILE_WORDS + 3).store(zero + part.begin)
    ring.tile_smem.index(slot * TILE_WORDS + 4).store(zero + part.end)
    if PACKED:
        ring.tile_smem.index(slot * TILE_WORDS + 5).store(zero + lengths.start_q)
        ring.tile_smem.index(slot * TILE_WORDS + 6).store(zero + lengths.seqlen_q)
        ring.tile_smem.index(slot * TILE_WORDS + 7).store(zero + lengths.seqlen_k)
    mbarrier.arrive(ring.tile_ready.index(slot), count=1)


@gluon.jit
def _word(ring, number):
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [4], [0])
    return gl.max(ring.tile_smem.index(number).load(layout), 0)


@gluon.jit
def _receive(ring, lengths, index, PACKED: gl.constexpr):
    """The program's index-th tile, and the lengths of its sequence."""
    slot, phase = _slot(index, TILE_SLOTS)
    mbarrier.wait(ring.tile_ready.index(slot), phase)
    first = slot * TILE_WORDS
    part = Part(_word(ring, first), _word(ring, first + 1), _word(ring, first + 2), _word(ring, first + 3),
                _word(ring, first + 4), 0, 0)  # fmt: skip
    if PACKED:
        lengths = Lengths(_word(ring, first + 5), lengths.start_k, _word(ring, first + 6), _word(ring, first + 7))
    mbarrier.arrive(ring.tile_free.index(slot), count=1)
    return part, lengths


@gluon.jit
def _load_rows(desc, smem, ready, place, head, row, LIVE: gl.constexpr, PACKED: gl.constexpr, COL: gl.constexpr = 0):
    """LIVE columns from COL on. head and row: of q as `_head_and_row` gives them."""
    mbarrier.expect(ready, boxes.num_boxes(desc, LIVE) * desc.block_type.nbytes)
    boxes.load(desc, smem, ready, place, head, row, LIVE, PACKED, COL)


@gluon.jit
def _head_and_row(head, row, HEADS: gl.constexpr):
    """In the order of the descriptors of q and out, which `arguments.descriptor` explains."""
    if HEADS == 1:
        return head, row
    else:
        return row, head * HEADS


@gluon.jit
def _q_slots(index, CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr):
    """Slots and phases of a consumer's queries of the program's index-th tile, and of their left half where it is apart."""
    slot, phase = _slot(index, 2)
    return slot * NUM_CONSUMERS + CONSUMER, phase, 2 * NUM_CONSUMERS + CONSUMER, index & 1


@gluon.jit
def _left_slot(ring, left):
    """Of q_smem, which has left halves alone where the rest is apart; its number among barriers is `left`."""
    return left - (ring.q_ready.shape[0] - ring.q_smem.shape[0])


@gluon.jit
def _load_q(q_desc, q_rest_desc, ring, index, part, lengths, HEADS: gl.constexpr, LIVE_D: gl.constexpr,
            CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr, SPLIT_Q: gl.constexpr, PACKED: gl.constexpr):  # fmt: skip
    """Queries of a consumer; with SPLIT_Q a slot has half of their columns."""
    slot, phase, left, left_phase = _q_slots(index, CONSUMER, NUM_CONSUMERS)
    COL: gl.constexpr = ring.q_smem.shape[-1] if SPLIT_Q else 0
    REST: gl.constexpr = LIVE_D - COL
    place, row = boxes.place(part.batch, lengths.start_q, lengths.seqlen_q, part.row_begin + CONSUMER * (ROWS // HEADS), PACKED)
    head, row = _head_and_row(part.head, row, HEADS)
    mbarrier.wait(ring.q_free.index(slot), phase ^ 1)
    if q_rest_desc is None:
        _load_rows(q_desc, ring.q_smem.index(slot), ring.q_ready.index(slot), place, head, row, REST, PACKED, COL)
    else:
        _load_rows(q_rest_desc, ring.q_rest_smem.index(slot), ring.q_ready.index(slot), place, head, row, REST, PACKED, COL)
    if SPLIT_Q:
        mbarrier.wait(ring.q_free.index(left), left_phase ^ 1)
        _load_rows(q_desc, ring.q_smem.index(_left_slot(ring, left)), ring.q_ready.index(left), place, head, row, COL, PACKED)


@gluon.jit
def _load_keys(desc, smem, ready, keys, pages, LIVE: gl.constexpr, PAGE_SIZE: gl.constexpr, GATHERED: gl.constexpr,
               PACKED: gl.constexpr, VALUES: gl.constexpr, COL: gl.constexpr = 0):  # fmt: skip
    """Start the loads of LIVE columns of k, or v, from COL on."""
    if GATHERED:
        if VALUES:
            boxes.gather(smem, pages, pages.v, keys.place, keys.row, keys.stop, keys.head, LIVE, PAGE_SIZE, COL)
        else:
            boxes.gather(smem, pages, pages.k, keys.place, keys.row, keys.stop, keys.head, LIVE, PAGE_SIZE, COL)
    elif pages is None:
        boxes.load(desc, smem, ready, keys.place, keys.head, keys.row, LIVE, PACKED, COL)
    else:
        boxes.load_pages(desc, smem, ready, pages, keys.place, keys.row, keys.stop, keys.head, LIVE, PAGE_SIZE, COL)


@gluon.jit
def _expect(ready, NUM_BYTES: gl.constexpr, GATHERED: gl.constexpr):
    if not GATHERED:
        mbarrier.expect(ready, NUM_BYTES)


@gluon.jit
def _tell(ready, GATHERED: gl.constexpr):
    """Let copies that this partition has started tell a barrier when they are done, once a thread; TMA does so by itself."""
    if GATHERED:
        async_copy.mbarrier_arrive(ready, increment_count=False)


@gluon.jit
def _wait_keys(ready, phase, GATHERED: gl.constexpr, pred=True):
    """Wait for keys or values."""
    mbarrier.wait(ready, phase, pred=pred)
    if GATHERED:
        fence_async_shared()


@gluon.jit
def _load_values(desc, ring, step, keys, pages, LIVE: gl.constexpr, PAGE_SIZE: gl.constexpr, GATHERED: gl.constexpr,
                 NUM_STAGES: gl.constexpr, PACKED: gl.constexpr):  # fmt: skip
    slot, phase = _slot(step, NUM_STAGES)
    ready = ring.v_ready.index(slot)
    mbarrier.wait(ring.v_free.index(slot), phase ^ 1)
    _expect(ready, boxes.num_bytes(desc, ring.v_smem, LIVE), GATHERED)
    _load_keys(desc, ring.v_smem.index(slot), ready, keys, pages, LIVE, PAGE_SIZE, GATHERED, PACKED, True)
    _tell(ready, GATHERED)


@gluon.jit
def _ask_next(counter, WARPS: gl.constexpr):
    """Ask the counter for the number of the next tile. The answer takes a microsecond: `_answer` waits for it."""
    layout: gl.constexpr = gl.BlockedLayout([1], [32], [WARPS], [0])
    lanes = gl.arange(0, 32 * WARPS, layout)
    # As a tensor: a scalar atomic is waited for at once. Relaxed: nothing but the number itself is exchanged.
    one = gl.full([32 * WARPS], 1, gl.int32, layout)
    return gl.atomic_add(counter + lanes * 0, one, mask=lanes == 0, sem="relaxed")


@gluon.jit
def _answer(numbers):
    layout: gl.constexpr = numbers.type.layout
    return gl.num_programs(0) + gl.max(gl.where(gl.arange(0, numbers.shape[0], layout) == 0, numbers, 0), 0)


@gluon.jit
def _keys_of(part, lengths, GROUP_SIZE: gl.constexpr, TILE_N: gl.constexpr, PACKED: gl.constexpr, PAGED: gl.constexpr):
    """The keys of a tile's first step, which are its last ones."""
    row = (part.end - 1) * TILE_N
    head = part.head // GROUP_SIZE
    if PAGED:
        return Keys(part.batch, head, lengths.start_k + row, lengths.start_k + lengths.seqlen_k)
    else:
        place, row = boxes.place(part.batch, lengths.start_k, lengths.seqlen_k, row, PACKED)
        return Keys(place, head, row, 0)


@gluon.jit
def _load_step(
    k_desc, k_rest_desc, v_desc, ring, step, i, first, before, pages, LIVE_D: gl.constexpr, LIVE_DV: gl.constexpr,
    TILE_N: gl.constexpr, PAGE_SIZE: gl.constexpr, GATHERED: gl.constexpr, NUM_STAGES: gl.constexpr, PACKED: gl.constexpr,
):  # fmt: skip
    """Keys of the i-th step of a tile, whose first ones are `first`, and the values of the step before: `before` at first."""
    row = first.row - i * TILE_N
    keys = Keys(first.place, first.head, row, first.stop)
    slot, phase = _slot(step + i, NUM_STAGES)
    ready = ring.k_ready.index(slot)
    COL: gl.constexpr = LIVE_D if k_rest_desc is None else ring.k_smem.shape[-1]
    mbarrier.wait(ring.k_free.index(slot), phase ^ 1)
    if k_rest_desc is None:
        _expect(ready, boxes.num_bytes(k_desc, ring.k_smem, COL), GATHERED)
        _load_keys(k_desc, ring.k_smem.index(slot), ready, keys, pages, COL, PAGE_SIZE, GATHERED, PACKED, False)
    else:
        REST: gl.constexpr = LIVE_D - COL
        REST_BYTES: gl.constexpr = boxes.num_bytes(k_rest_desc, ring.k_rest_smem, REST)
        _expect(ready, boxes.num_bytes(k_desc, ring.k_smem, COL) + REST_BYTES, GATHERED)
        _load_keys(k_desc, ring.k_smem.index(slot), ready, keys, pages, COL, PAGE_SIZE, GATHERED, PACKED, False)
        _load_keys(k_rest_desc, ring.k_rest_smem.index(slot), ready, keys, pages, REST, PAGE_SIZE, GATHERED, PACKED, False,
                   COL)  # fmt: skip
    _tell(ready, GATHERED)
    if step + i > 0:
        place = gl.where(i > 0, first.place, before.place)
        head = gl.where(i > 0, first.head, before.head)
        stop = gl.where(i > 0, first.stop, before.stop)
        keys = Keys(place, head, gl.where(i > 0, row + TILE_N, before.row), stop)
        _load_values(v_desc, ring, step + i - 1, keys, pages, LIVE_DV, PAGE_SIZE, GATHERED, NUM_STAGES, PACKED)


@gluon.jit
def _load(
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, ring, counter, order, table, pages, lengths, window,
    GROUP_SIZE: gl.constexpr, HEADS: gl.constexpr, LIVE_D: gl.constexpr, LIVE_DV: gl.constexpr, TILE_N: gl.constexpr,
    PAGE_SIZE: gl.constexpr, GATHERED: gl.constexpr, NUM_CONSUMERS: gl.constexpr, SPLIT_Q: gl.constexpr,
    NUM_STAGES: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """The producer: all tiles of this program, and all loads."""
    TILE_M: gl.constexpr = ROWS // HEADS * NUM_CONSUMERS
    PACKED: gl.constexpr = table is not None
    index = 0
    step = 0
    before = Keys(0, 0, 0, 0)
    part, lengths = _tile_part(gl.program_id(0), order, table, lengths, window, TILE_M, TILE_N)
    _publish(ring, part, lengths, index, WARPS, PACKED)
    while part.end > 0:
        for consumer in gl.static_range(NUM_CONSUMERS):
            _load_q(q_desc, q_rest_desc, ring, index, part, lengths, HEADS, LIVE_D, consumer, NUM_CONSUMERS, SPLIT_Q, PACKED)
        first = _keys_of(part, lengths, GROUP_SIZE, TILE_N, PACKED, pages is not None)
        steps = part.end - part.begin
        for i in range(steps - 2):
            _load_step(k_desc, k_rest_desc, v_desc, ring, step, i, first, before, pages, LIVE_D, LIVE_DV, TILE_N, PAGE_SIZE,
                       GATHERED, NUM_STAGES, PACKED)  # fmt: skip
        # As late as can be, so that tiles go to whom is free first, and before the last loads, which wait for their slots.
        numbers = _ask_next(counter, WARPS)
        if steps > 1:
            _load_step(k_desc, k_rest_desc, v_desc, ring, step, steps - 2, first, before, pages, LIVE_D, LIVE_DV, TILE_N,
                       PAGE_SIZE, GATHERED, NUM_STAGES, PACKED)  # fmt: skip
        next_part, next_lengths = _tile_part(_answer(numbers), order, table, lengths, window, TILE_M, TILE_N)
        _load_step(k_desc, k_rest_desc, v_desc, ring, step, steps - 1, first, before, pages, LIVE_D, LIVE_DV, TILE_N, PAGE_SIZE,
                   GATHERED, NUM_STAGES, PACKED)  # fmt: skip
        before = Keys(first.place, first.head, first.row - (steps - 1) * TILE_N, first.stop)
        step += steps
        index += 1
        part = next_part
        lengths = next_lengths
        _publish(ring, part, lengths, index, WARPS, PACKED)
    # A packed call may have fewer tiles than programs.
    if step > 0:
        _load_values(v_desc, ring, step - 1, before, pages, LIVE_DV, PAGE_SIZE, GATHERED, NUM_STAGES, PACKED)
    # The last program to come here leaves the counter as it was found.
    if gl.atomic_add(counter + 1, 1) == gl.num_programs(0) - 1:
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def _wait_turn(CONSUMER: gl.constexpr, pred=True):
    """Wait until the consumer before this one has started its products."""
    if pred:
        nothing = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
        gl.inline_asm_elementwise(_WAIT_TURN[CONSUMER], "=r,r", [nothing], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _pass_turn(CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr, pred=True):
    if pred:
        nothing = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
        gl.inline_asm_elementwise(_PASS_TURN[(CONSUMER + 1) % NUM_CONSUMERS], "=r,r", [nothing], dtype=gl.int32,
                                  is_pure=False, pack=1)  # fmt: skip


@gluon.jit
def _load_left(ring, left, phase, TILE_N: gl.constexpr, pred):
    """The left half of the queries, as an operand in registers."""
    layout: gl.constexpr = columns.layout_of(TILE_N)
    mbarrier.wait(ring.q_ready.index(left), phase, pred=pred)
    q = ring.q_smem.index(_left_slot(ring, left)).reshape([ROWS, ring.q_smem.shape[-1]])
    return q.load(gl.DotOperandLayout(0, layout, 2))


@gluon.jit
def _some_keys(tile, KEYS: gl.constexpr, LAST: gl.constexpr):
    """The first KEYS rows of a tile, or the last."""
    if KEYS == tile.shape[0]:
        return tile
    else:
        return tile.slice(tile.shape[0] - KEYS if LAST else 0, KEYS, dim=0)


@gluon.jit
def _bias_columns(KEYS: gl.constexpr):
    """The right operand of a product that adds ALiBi's bias, with `_bias_operand`: a key's place in its tile, from the middle.

    In three columns, exactly: bf16 holds integers to 256.
    """
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [16, 2], [4, 1], [1, 0])
    keys = gl.arange(0, KEYS, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, BIAS_COLUMNS, gl.SliceLayout(0, layout))[None, :]
    shared: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BIAS_COLUMNS], gl.bfloat16)
    places = gl.where(cols < 3, keys - KEYS // 2, 0).to(gl.bfloat16)
    bias_smem = gl.allocate_shared_memory(gl.bfloat16, [KEYS, BIAS_COLUMNS], shared, places)
    fence_async_shared()
    return bias_smem


@gluon.jit
def _bias_operand(slope, TILE_N: gl.constexpr):
    """The left operand: the slope, in three parts of bf16, which have all of its bits. slope: of `scores.load_slope`."""
    layout: gl.constexpr = gl.DotOperandLayout(0, columns.layout_of(TILE_N), 2)
    cols = gl.arange(0, BIAS_COLUMNS, gl.SliceLayout(0, layout))[None, :] + gl.zeros([ROWS, BIAS_COLUMNS], gl.int32, layout)
    first = (-slope).to(gl.bfloat16).to(gl.float32)
    second = (-slope - first).to(gl.bfloat16).to(gl.float32)
    third = -slope - first - second
    return gl.where(cols == 0, first, gl.where(cols == 1, second, gl.where(cols == 2, third, 0.0))).to(gl.bfloat16)


@gluon.jit
def _row_bias(part, n_tile, lengths, slope, TILE_N: gl.constexpr):
    """The bias of each row in the middle of a step's keys, to which the product adds the rest."""
    i = gl.arange(0, ROWS, gl.SliceLayout(1, columns.layout_of(TILE_N)))
    return slope * (part.row_begin + lengths.seqlen_k - lengths.seqlen_q - n_tile * TILE_N - TILE_N // 2 + i).to(gl.float32)


@gluon.jit
def _start_scores(ring, q_slot, q_left, bias, step, LIVE_D: gl.constexpr, TILE_N: gl.constexpr, NUM_STAGES: gl.constexpr,
                  KEYS: gl.constexpr, LAST: gl.constexpr = False):  # fmt: skip
    """Start q kᵀ of a step's first KEYS keys, or LAST, of LIVE_D columns, and what adds the bias; the keys must be there.

    q_left: left half of q, and the slot has the right one; None: all of it. bias: `_bias_operand`, or None; not beside q_left.
    """
    layout: gl.constexpr = columns.layout_of(KEYS)
    BLOCK_D: gl.constexpr = ring.k_smem.shape[-1]
    COLS: gl.constexpr = ring.q_smem.shape[-1]
    REST: gl.constexpr = LIVE_D - COLS
    APART: gl.constexpr = ring.q_smem.shape[0] < ring.q_ready.shape[0]
    if APART:
        q = ring.q_rest_smem.index(q_slot).reshape([ROWS, REST])
    else:
        q = ring.q_smem.index(q_slot).reshape([ROWS, COLS])
    k = _some_keys(ring.k_smem.index(step % NUM_STAGES).reshape([TILE_N, BLOCK_D]), KEYS, LAST)
    nothing = gl.zeros([ROWS, KEYS], gl.float32, layout)
    if bias is not None:
        # Last: sums are cut to 24 bits at each 16 columns
        raw = columns.contract(q, k, nothing, LIVE_D, USE_ACC=False)
        return warpgroup_mma(bias, ring.bias_smem.permute((1, 0)), raw, is_async=True)
    elif q_left is None:
        return columns.contract(q, k, nothing, LIVE_D, USE_ACC=False)
    elif not APART:
        raw = warpgroup_mma(q_left, k.slice(0, COLS, dim=1).permute((1, 0)), nothing, use_acc=False, is_async=True)
        q_rest, k_rest = q.slice(0, REST, dim=1), k.slice(COLS, REST, dim=1)
        return warpgroup_mma(q_rest, k_rest.permute((1, 0)), raw, is_async=True)
    else:
        raw = warpgroup_mma(q_left, k.permute((1, 0)), nothing, use_acc=False, is_async=True)
        k_rest = _some_keys(ring.k_rest_smem.index(step % NUM_STAGES).reshape([TILE_N, REST]), KEYS, LAST)
        return warpgroup_mma(q, k_rest.permute((1, 0)), raw, is_async=True)


@gluon.jit
def _start_values(ring, p, acc, step, TILE_N: gl.constexpr, GATHERED: gl.constexpr, NUM_STAGES: gl.constexpr,
                  CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr, pred=True):  # fmt: skip
    """Wait for the values of a step, start acc + p v, and pass the turn."""
    slot, phase = _slot(step, NUM_STAGES)
    _wait_keys(ring.v_ready.index(slot), phase, GATHERED)
    acc = columns.accumulate(p, ring.v_smem.index(slot).reshape([TILE_N, ring.v_smem.shape[-1]]), acc)
    _pass_turn(CONSUMER, NUM_CONSUMERS, pred)
    return acc


@gluon.jit
def _rows_and_heads(part, HEADS: gl.constexpr, layout: gl.constexpr):
    """Position of each row of a consumer, and its head."""
    i = gl.arange(0, ROWS, layout)
    if HEADS == 1:
        return part.row_begin + i, part.head
    else:
        return part.row_begin + i // HEADS, part.head * HEADS + i % HEADS


@gluon.constexpr_function
def _piece(keys):
    """Scores of a thread to cap at a time: half of them, which fit in its registers."""
    return ROWS.value * keys // 256


@gluon.jit
def _logits(raw, bias, part, n_tile, lengths, slope, score_params, cap, TILE_N: gl.constexpr, LAZY: gl.constexpr):
    """Logits of a step's scores, of all its keys or the first of them, but for `_row_bias`."""
    if bias is not None:
        return raw
    KEYS: gl.constexpr = raw.shape[1]
    layout: gl.constexpr = raw.type.layout
    rows = gl.arange(0, ROWS, gl.SliceLayout(1, layout))[:, None]
    cols = gl.arange(0, KEYS, gl.SliceLayout(0, layout))[None, :]
    # of tiles of one head, as ALiBi has them
    diagonal = part.row_begin + lengths.seqlen_k - lengths.seqlen_q - n_tile * TILE_N
    if cap is not None:
        return softmax.capped(raw, cap, _piece(KEYS))
    else:
        # A softcap without exponentials where these and products are what takes time; not at head dim 256
        THREAD: gl.constexpr = 0 if LAZY else ROWS * KEYS // 128
        return scores.logits(raw, rows, cols, diagonal, slope, score_params, THREAD)


@gluon.jit
def _hide(logits, part, n_tile, lengths, window, HEADS: gl.constexpr, TILE_N: gl.constexpr):
    """logits, -inf where keys are hidden."""
    layout: gl.constexpr = logits.type.layout
    rows = _rows_and_heads(part, HEADS, gl.SliceLayout(1, layout))[0][:, None]
    cols = gl.arange(0, logits.shape[1], gl.SliceLayout(0, layout))[None, :]
    return gl.where(masks.visible_keys(rows, cols, lengths, window, n_tile * TILE_N), logits, NEG_INF)


@gluon.jit
def _hide_first(logits, part, n_tile, lengths, window, HEADS: gl.constexpr, TILE_N: gl.constexpr, CUT_LAST: gl.constexpr,
                HALF_SEEN: gl.constexpr):  # fmt: skip
    """`_hide` of a first tile. CUT_LAST: no key of it lies left of the window. HALF_SEEN: then its left half is seen."""
    if CUT_LAST:
        layout: gl.constexpr = logits.type.layout
        rows = _rows_and_heads(part, HEADS, gl.SliceLayout(1, layout))[0][:, None]
        cols = gl.arange(0, logits.shape[1], gl.SliceLayout(0, layout))[None, :]
        seen = masks.visible_keys(rows, cols, lengths, Window(None, window.right), n_tile * TILE_N)
        if HALF_SEEN:
            # The compiler knows which: of a column's bits only the last few depend on the thread
            seen = seen | (cols < TILE_N // 2)
        return gl.where(seen, logits, NEG_INF)
    else:
        return _hide(logits, part, n_tile, lengths, window, HEADS, TILE_N)


@gluon.jit
def _hide_left(logits, part, n_tile, lengths, window, HEADS: gl.constexpr, TILE_N: gl.constexpr, HALF_SEEN: gl.constexpr):
    """logits of a tile's last keys, -inf left of the window; the rest is seen, and with HALF_SEEN all of the right half."""
    layout: gl.constexpr = logits.type.layout
    rows = _rows_and_heads(part, HEADS, gl.SliceLayout(1, layout))[0][:, None]
    cols = gl.arange(0, logits.shape[1], gl.SliceLayout(0, layout))[None, :]
    seen = masks.right_of_left_edge(rows, cols, lengths, window, (n_tile + 1) * TILE_N - logits.shape[1])
    if HALF_SEEN:
        seen = seen | (cols >= TILE_N // 2)
    return gl.where(seen, logits, NEG_INF)


@gluon.jit
def _hide_some(logits, part, n_tile, lengths, window, HEADS: gl.constexpr, TILE_N: gl.constexpr, MASKED: gl.constexpr,
               CUT: gl.constexpr, HALF_SEEN: gl.constexpr):  # fmt: skip
    """logits of a step, -inf where keys are hidden. MASKED, CUT, HALF_SEEN: as for `_absorb_tile`."""
    if CUT:
        logits = _hide_left(logits, part, n_tile, lengths, window, HEADS, TILE_N, HALF_SEEN)
    elif MASKED:
        # In one loop: p from another one would be taken apart and put together again in every step
        if (n_tile < part.full_begin) | (n_tile >= part.full_end):
            logits = _hide(logits, part, n_tile, lengths, window, HEADS, TILE_N)
    return logits


@gluon.jit
def _keep_bits(part, n_tile, stream, dropout, num_heads, TILE_N: gl.constexpr):
    """Which weights of a step dropout keeps, for `_as_operand`; without dropout a placeholder. Under products."""
    if dropout.rng_state is None:
        return 0
    else:
        stream = RandomStream(stream.seed, (part.batch * num_heads + part.head).to(gl.uint32), stream.offset)
        return dropouts.keep_bits(part.row_begin, n_tile * TILE_N, stream, dropout, TILE_N)


@gluon.jit
def _as_operand(p, kept, dropout, ring, acc):
    """p in the dtype of v, as the left operand of p v."""
    p = p.to(ring.v_smem.dtype)
    if dropout.rng_state is not None:
        p = dropouts.drop(p, kept)
    return columns.as_operand(p, acc[0])


@gluon.jit
def _update(state, logits, scale_log2, row_bias, LAZY: gl.constexpr, MASKED: gl.constexpr, HOLD: gl.constexpr):
    """Softmax of one step. Nothing that follows waits before all exponentials are done (LAZY), or a quarter of them (HOLD);
    ptxas moves waits up."""
    if LAZY:
        state, p, correction = softmax.update_lazily(state, logits, scale_log2, MASKED)
        row_sum = gl.inline_asm_elementwise(_HOLD, "=r,=r,r,r", [state.row_sum], dtype=gl.float32, is_pure=False, pack=2)
        return softmax.OnlineSoftmax(state.row_max, row_sum), p, correction
    else:
        return softmax.update_apart(state, logits, scale_log2, MASKED, HOLD, row_bias)


@gluon.jit
def _begin(logits, scale_log2, row_bias, TILE_N: gl.constexpr, LAZY: gl.constexpr, MASKED: gl.constexpr):
    """State and p of a first step, whose keys past the columns of logits are hidden."""
    if LAZY:
        return softmax.begin(logits, scale_log2, MASKED)
    else:
        state, p = softmax.begin_apart(logits, scale_log2, MASKED, row_bias)
        if logits.shape[1] == TILE_N:
            return state, p
        else:
            return softmax.widened(state, p, columns.layout_of(TILE_N))


@gluon.jit
def _first(raw, bias, part, lengths, window, slope, score_params, cap, HEADS: gl.constexpr, TILE_N: gl.constexpr,
           LAZY: gl.constexpr, MASKED: gl.constexpr, BOUNDED: gl.constexpr, CUT_LAST: gl.constexpr,
           HALF_SEEN: gl.constexpr):  # fmt: skip
    """State and p of the first step of a part. CUT_LAST, HALF_SEEN: of `_hide_first`."""
    n_tile = part.end - 1
    if BOUNDED:
        if MASKED:
            logits = softmax.capped(raw, cap, _piece(raw.shape[1]))
            p, row_sum = softmax.bounded_of(_hide(logits, part, n_tile, lengths, window, HEADS, TILE_N))
        else:
            p, row_sum = softmax.bounded(raw, cap, _piece(raw.shape[1]))
        return softmax.begin_bounded(p, row_sum), p
    else:
        logits = _logits(raw, bias, part, n_tile, lengths, slope, score_params, cap, TILE_N, LAZY)
        if MASKED:
            logits = _hide_first(logits, part, n_tile, lengths, window, HEADS, TILE_N, CUT_LAST, HALF_SEEN)
        row_bias = None
        if bias is not None:
            row_bias = _row_bias(part, n_tile, lengths, slope, TILE_N)
        return _begin(logits, scores.scale_log2(score_params), row_bias, TILE_N, LAZY, MASKED)


@gluon.jit
def _absorb_tile(
    ring, q_slot, q_left, bias, state, acc, p, step, part, n_tile, lengths, window, slope, score_params, cap, stream, dropout,
    num_heads, HEADS: gl.constexpr, LIVE_D: gl.constexpr, TILE_N: gl.constexpr, GATHERED: gl.constexpr,
    NUM_STAGES: gl.constexpr, CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr, LAZY: gl.constexpr, MASKED: gl.constexpr,
    BOUNDED: gl.constexpr, KEYS: gl.constexpr, CUT: gl.constexpr = False, HALF_SEEN: gl.constexpr = False,
):  # fmt: skip
    """Scores and softmax of one step, and the product of the step before. MASKED: its tile may have hidden keys.

    CUT: a window's left edge cuts its tile, of which the last KEYS may be seen, and with HALF_SEEN the right half is.
    """
    slot, phase = _slot(step, NUM_STAGES)
    _wait_keys(ring.k_ready.index(slot), phase, GATHERED)
    _wait_turn(CONSUMER)
    raw = _start_scores(ring, q_slot, q_left, bias, step, LIVE_D, TILE_N, NUM_STAGES, KEYS, CUT)
    product = _start_values(ring, p, acc, step - 1, TILE_N, GATHERED, NUM_STAGES, CONSUMER, NUM_CONSUMERS)
    kept = _keep_bits(part, n_tile, stream, dropout, num_heads, TILE_N)
    raw = warpgroup_mma_wait(len(acc), deps=[raw])
    mbarrier.arrive(ring.k_free.index(slot), count=1)
    if BOUNDED:
        if CUT or MASKED:
            logits = softmax.capped(raw, cap, _piece(raw.shape[1]))
            logits = _hide_some(logits, part, n_tile, lengths, window, HEADS, TILE_N, MASKED, CUT, HALF_SEEN)
            p, row_sum = softmax.bounded_of(logits)
        else:
            p, row_sum = softmax.bounded(raw, cap, _piece(raw.shape[1]))
        state = softmax.update_bounded(state, row_sum)
        acc = columns.wait(product)
        mbarrier.arrive(ring.v_free.index((step - 1) % NUM_STAGES), count=1)
        return state, acc, _as_operand(p, kept, dropout, ring, acc)
    else:
        logits = _logits(raw, bias, part, n_tile, lengths, slope, score_params, cap, TILE_N, LAZY)
        row_bias = None
        if bias is not None:
            row_bias = _row_bias(part, n_tile, lengths, slope, TILE_N)
        logits = _hide_some(logits, part, n_tile, lengths, window, HEADS, TILE_N, MASKED, CUT, HALF_SEEN)
        HOLD: gl.constexpr = NUM_CONSUMERS == 2 and score_params.softcap is None and dropout.rng_state is None
        if KEYS < TILE_N:
            state = softmax.relaid(state, logits)
        state, p, correction = _update(state, logits, scores.scale_log2(score_params), row_bias, LAZY, MASKED or CUT, HOLD)
        if KEYS < TILE_N:
            state, p = softmax.widened(state, p, columns.layout_of(TILE_N), True)
        acc = columns.wait(product)
        mbarrier.arrive(ring.v_free.index((step - 1) % NUM_STAGES), count=1)
        acc = columns.scale_rarely(acc, correction) if LAZY else columns.scale(acc, correction)
        return state, acc, _as_operand(p, kept, dropout, ring, acc)


@gluon.jit
def _skip_keys(ring, step, count, NUM_STAGES: gl.constexpr, CONSUMER: gl.constexpr, NUM_CONSUMERS: gl.constexpr):
    """Hand the keys of `count` steps back. Each must have come, or the arrival would count for the fill before."""
    for i in range(step, step + count):
        slot, phase = _slot(i, NUM_STAGES)
        mbarrier.wait(ring.k_ready.index(slot), phase)
        _wait_turn(CONSUMER)
        _pass_turn(CONSUMER, NUM_CONSUMERS)
        mbarrier.arrive(ring.k_free.index(slot), count=1)


@gluon.jit
def _skip_values(ring, step, count, NUM_STAGES: gl.constexpr):
    for i in range(step, step + count):
        slot, phase = _slot(i, NUM_STAGES)
        mbarrier.wait(ring.v_ready.index(slot), phase)
        mbarrier.arrive(ring.v_free.index(slot), count=1)


@gluon.jit
def _store(out_desc, lse, ring, acc, row_lse, part, lengths, num_heads, slot, left, HEADS: gl.constexpr,
           PACKED: gl.constexpr):  # fmt: skip
    """Write 64 rows of out, through shared memory, and of lse. The store of out is still under way at the end.

    left: slot for the left half of out, and the other has the right one; for all of it where the rest of q is apart. None: the
    other has all of it.
    """
    COLS: gl.constexpr = out_desc.block_type.shape[-1]
    APART: gl.constexpr = ring.q_smem.shape[0] < ring.q_ready.shape[0]
    HALVES: gl.constexpr = left is not None and not APART
    buffer = ring.out_smem.index(_left_slot(ring, left) if APART else slot)
    tile = buffer.reshape([ROWS, COLS])
    if not HALVES:
        columns.store(acc, tile)
    else:
        left_buffer = ring.out_smem.index(left)
        out_left, out_right = columns.halves(acc[0]) if len(acc) == 1 else acc
        left_buffer.reshape([ROWS, COLS]).store(out_left.to(tile.dtype))
        tile.slice(0, out_right.shape[1], dim=1).store(out_right.to(tile.dtype))
    fence_async_shared()
    partition_barrier()
    place, row = boxes.place(part.batch, lengths.start_q, lengths.seqlen_q, part.row_begin, PACKED)
    head, row = _head_and_row(part.head, row, HEADS)
    if not HALVES:
        boxes.store(out_desc, buffer, place, head, row, PACKED)
    else:
        boxes.store(out_desc, left_buffer, place, head, row, PACKED)
        boxes.store(out_desc, buffer, place, head, row, PACKED, COLS)
    # After the fence, which waits for stores before it
    layout: gl.constexpr = row_lse.type.layout
    rows, heads = _rows_and_heads(part, HEADS, layout)
    if PACKED:
        head_lse = lse.ptr + heads.to(gl.int64) * lse.stride + lengths.start_q
        if lse.apart is not None:
            head_lse += part.batch * lse.apart.to(gl.int64)
    else:
        head_lse = lse.ptr + (part.batch * (num_heads * HEADS) + heads).to(gl.int64) * lse.stride
    gl.store(head_lse + rows, row_lse, mask=rows < lengths.seqlen_q)


@gluon.jit
def _compute(
    out_desc, lse, ring, num_heads, lengths, window, score_params, cap, sinks, dropout,
    HEADS: gl.constexpr, LIVE_D: gl.constexpr, LIVE_DV: gl.constexpr, TILE_N: gl.constexpr, GATHERED: gl.constexpr,
    NUM_CONSUMERS: gl.constexpr, SPLIT_Q: gl.constexpr, NUM_STAGES: gl.constexpr, LAZY: gl.constexpr, MASK_FIRST: gl.constexpr,
    MASK_OTHERS: gl.constexpr, OWN_OUT: gl.constexpr, HALF_FIRST: gl.constexpr, CUT_LAST: gl.constexpr, HALF_LAST: gl.constexpr,
    BIAS: gl.constexpr, BOUNDED: gl.constexpr, PACKED: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """A consumer: 64 rows of each tile of this program. HALF_FIRST: the first sees half of its first key tile.

    CUT_LAST: a window's left edge cuts one tile of a consumer, its last, or none. HALF_LAST: of two consumers the one that sees
    the right half of that alone, or -1.
    """
    KEYS: gl.constexpr = TILE_N // 2 if HALF_FIRST and CONSUMER == 0 else TILE_N
    HALF_SEEN: gl.constexpr = HALF_FIRST and CONSUMER == 1
    LAST_KEYS: gl.constexpr = TILE_N // 2 if HALF_LAST == CONSUMER else TILE_N
    LAST_HALF_SEEN: gl.constexpr = HALF_LAST >= 0 and HALF_LAST != CONSUMER
    no_values = columns.accumulators(ROWS, ring.v_smem.shape[-1], LIVE_DV)
    if cap is not None:
        cap = scores.cap_of_lane(cap)
    stream = dropouts.load_stream(dropout, num_heads)

    if CONSUMER == NUM_CONSUMERS - 1:
        _pass_turn(CONSUMER, NUM_CONSUMERS)
    whole, lengths = _receive(ring, lengths, 0, PACKED)
    # A packed call may have fewer tiles than programs: then nothing comes.
    some = whole.end > 0
    part = _consumer_part(whole, lengths, window, HEADS, TILE_N, CONSUMER)
    slope = scores.load_slope(score_params, part.batch, part.head)
    bias = None
    if BIAS:
        bias = _bias_operand(slope, TILE_N)
    # Steps before the first of this tile whose values are still to be handed back
    skipped = whole.end - part.end
    _skip_keys(ring, 0, skipped, NUM_STAGES, CONSUMER, NUM_CONSUMERS)
    step = skipped
    slot, phase = _slot(step, NUM_STAGES)
    q_slot, q_phase, left, left_phase = _q_slots(0, CONSUMER, NUM_CONSUMERS)
    mbarrier.wait(ring.q_ready.index(q_slot), q_phase, pred=some)
    q_left = None
    if SPLIT_Q:
        q_left = _load_left(ring, left, left_phase, TILE_N, some)
    _wait_keys(ring.k_ready.index(slot), phase, GATHERED, some)
    _wait_turn(CONSUMER, some)
    raw = _start_scores(ring, q_slot, q_left, bias, step, LIVE_D, TILE_N, NUM_STAGES, KEYS)
    _pass_turn(CONSUMER, NUM_CONSUMERS, some)
    kept = _keep_bits(part, part.end - 1, stream, dropout, num_heads, TILE_N)
    raw = warpgroup_mma_wait(0, deps=[raw])
    mbarrier.arrive(ring.k_free.index(slot), count=1, pred=some)
    if SPLIT_Q:
        # Not before: it may still be on its way to registers, and TMA does not wait for that
        mbarrier.arrive(ring.q_free.index(left), count=1, pred=some)
    state, p = _first(raw, bias, part, lengths, window, slope, score_params, cap, HEADS, TILE_N, LAZY, MASK_FIRST, BOUNDED,
                      CUT_LAST, HALF_SEEN)  # fmt: skip
    p = _as_operand(p, kept, dropout, ring, no_values)
    index = 0
    while whole.end > 0:
        _skip_values(ring, step - skipped, skipped, NUM_STAGES)
        acc = no_values
        # step of key tile n is last_step - n
        last_step = step + part.end - 1
        # 1 where a window's left edge cuts the last tile: outside of the loop, which has no mask then
        cut = part.full_begin - part.begin if CUT_LAST else 0
        for step in range(last_step - part.end + 2, last_step - part.begin + 1 - cut):
            state, acc, p = _absorb_tile(
                ring, q_slot, q_left, bias, state, acc, p, step, part, last_step - step, lengths, window, slope, score_params,
                cap, stream, dropout, num_heads, HEADS, LIVE_D, TILE_N, GATHERED, NUM_STAGES, CONSUMER, NUM_CONSUMERS, LAZY,
                MASK_OTHERS, BOUNDED, TILE_N,
            )  # fmt: skip
        last_step = last_step - part.begin
        if CUT_LAST:
            if cut > 0:
                state, acc, p = _absorb_tile(
                    ring, q_slot, q_left, bias, state, acc, p, last_step, part, part.begin, lengths, window, slope,
                    score_params, cap, stream, dropout, num_heads, HEADS, LIVE_D, TILE_N, GATHERED, NUM_STAGES, CONSUMER,
                    NUM_CONSUMERS, LAZY, False, BOUNDED, LAST_KEYS, True, LAST_HALF_SEEN,
                )  # fmt: skip

        # The border: the first scores of the next tile with the last product of this one
        index += 1
        next_whole, next_lengths = _receive(ring, lengths, index, PACKED)
        more = next_whole.end > 0
        next_part = _consumer_part(next_whole, next_lengths, window, HEADS, TILE_N, CONSUMER)
        next_slope = scores.load_slope(score_params, next_part.batch, next_part.head) if more else slope
        if BIAS:
            bias = _bias_operand(next_slope, TILE_N)
        skipped = part.begin - whole.begin
        if more:
            skipped += next_whole.end - next_part.end
        _skip_keys(ring, last_step + 1, skipped, NUM_STAGES, CONSUMER, NUM_CONSUMERS)
        step = last_step + 1 + skipped
        slot, phase = _slot(step, NUM_STAGES)
        next_q_slot, q_phase, left, left_phase = _q_slots(index, CONSUMER, NUM_CONSUMERS)
        _wait_turn(CONSUMER, more)
        mbarrier.wait(ring.q_ready.index(next_q_slot), q_phase, pred=more)
        if SPLIT_Q:
            q_left = _load_left(ring, left, left_phase, TILE_N, more)
        _wait_keys(ring.k_ready.index(slot), phase, GATHERED, more)
        # After the last tile these products are of whatever the slots hold, and nothing reads them.
        raw = _start_scores(ring, next_q_slot, q_left, bias, step, LIVE_D, TILE_N, NUM_STAGES, KEYS)
        product = _start_values(ring, p, acc, last_step, TILE_N, GATHERED, NUM_STAGES, CONSUMER, NUM_CONSUMERS, more)
        kept = _keep_bits(next_part, next_part.end - 1, stream, dropout, num_heads, TILE_N)
        raw = warpgroup_mma_wait(len(acc), deps=[raw])
        mbarrier.arrive(ring.k_free.index(slot), count=1, pred=more)
        if OWN_OUT:
            mbarrier.arrive(ring.q_free.index(q_slot), count=1)
            if SPLIT_Q:
                mbarrier.arrive(ring.q_free.index(left), count=1)
        next_state, p = _first(raw, bias, next_part, next_lengths, window, next_slope, score_params, cap, HEADS, TILE_N, LAZY,
                               MASK_FIRST, BOUNDED, CUT_LAST, HALF_SEEN)  # fmt: skip
        p = _as_operand(p, kept, dropout, ring, acc)
        if OWN_OUT:
            tma_store_wait(0)
        acc = columns.wait(product)
        mbarrier.arrive(ring.v_free.index(last_step % NUM_STAGES), count=1)
        if not LAZY or BOUNDED:
            state = softmax.join(state)
        if sinks is not None:
            row_layout: gl.constexpr = state.row_max.type.layout
            heads = _rows_and_heads(part, HEADS, row_layout)[1]
            state, correction = softmax.absorb_sink(state, gl.load(sinks + heads).to(gl.float32))
            acc = columns.scale(acc, correction)
        inverse, row_lse = softmax.finish(state)
        if dropout.rng_state is not None:
            inverse = inverse * dropout.keep_scale
        _store(out_desc, lse, ring, columns.scale(acc, inverse), row_lse, part, lengths, num_heads,
               CONSUMER if OWN_OUT else q_slot, left if SPLIT_Q and not OWN_OUT else None, HEADS, PACKED)  # fmt: skip
        if not OWN_OUT:
            tma_store_wait(0)
            mbarrier.arrive(ring.q_free.index(q_slot), count=1)
            if SPLIT_Q:
                mbarrier.arrive(ring.q_free.index(left), count=1)
        q_slot = next_q_slot
        state = next_state
        slope = next_slope
        whole = next_whole
        part = next_part
        lengths = next_lengths
    tma_store_wait(0)


@gluon.jit
def _allocate(q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, out_desc, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr,
              LIVE_D: gl.constexpr, TILE_N: gl.constexpr, NUM_CONSUMERS: gl.constexpr, SPLIT_Q: gl.constexpr,
              NUM_STAGES: gl.constexpr, OWN_OUT: gl.constexpr, BIAS: gl.constexpr, GATHERED: gl.constexpr):  # fmt: skip
    # What fills a slot of keys: TMA, told by one thread, or the producer's threads
    FILLS: gl.constexpr = 128 if GATHERED else 1
    # Boxes of a page, or of a part of one
    PIECES: gl.constexpr = TILE_N // k_desc.block_type.shape[-2]
    Q_SLOTS: gl.constexpr = NUM_CONSUMERS * (3 if SPLIT_Q else 2)
    LEFT: gl.constexpr = BLOCK_D // 2 if SPLIT_Q else BLOCK_D
    if q_rest_desc is None:
        q_smem = boxes.allocate(q_desc, Q_SLOTS, LEFT)
        q_rest_smem = q_smem
    else:
        q_smem = boxes.allocate(q_desc, NUM_CONSUMERS, LEFT)
        q_rest_smem = boxes.allocate(q_rest_desc, 2 * NUM_CONSUMERS, LIVE_D - LEFT)
    if OWN_OUT:
        out_smem = boxes.allocate(out_desc, NUM_CONSUMERS, out_desc.block_type.shape[-1])
    else:
        out_smem = q_smem
    if BIAS:
        bias_smem = _bias_columns(TILE_N)
    else:
        bias_smem = q_smem
    tile_smem = gl.allocate_shared_memory(gl.int32, [TILE_SLOTS * TILE_WORDS, 1], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    if k_rest_desc is None:
        k_smem = boxes.allocate(k_desc, NUM_STAGES, BLOCK_D, PIECES)
        k_rest_smem = k_smem
    else:
        k_smem = boxes.allocate(k_desc, NUM_STAGES, LEFT, PIECES)
        k_rest_smem = boxes.allocate(k_rest_desc, NUM_STAGES, LIVE_D - LEFT, PIECES)
    v_smem = boxes.allocate(v_desc, NUM_STAGES, BLOCK_DV, PIECES)
    return Ring(
        q_smem, q_rest_smem, k_smem, k_rest_smem, v_smem, out_smem, bias_smem, tile_smem,
        allocate_barriers(Q_SLOTS, 1), allocate_barriers(Q_SLOTS, 1),
        allocate_barriers(NUM_STAGES, FILLS), allocate_barriers(NUM_STAGES, NUM_CONSUMERS),
        allocate_barriers(NUM_STAGES, FILLS), allocate_barriers(NUM_STAGES, NUM_CONSUMERS),
        allocate_barriers(TILE_SLOTS, 1), allocate_barriers(TILE_SLOTS, NUM_CONSUMERS),
    )  # fmt: skip


@gluon.jit(do_not_specialize=[
    "lse_stride", "lse_apart", "seqlen_q", "seqlen_k", "num_tiles", "num_heads", "total_heads", "heads_per_group", "tail_heads",
])  # fmt: skip
def attention_forward(
    q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, out_desc, lse, counter, table, pages, window, score_params, cap, sinks,
    dropout, lse_stride, lse_apart, seqlen_q, seqlen_k, num_tiles, num_heads, total_heads, heads_per_group, tail_heads,
    GROUP_SIZE: gl.constexpr, HEADS: gl.constexpr, BLOCK_D: gl.constexpr, BLOCK_DV: gl.constexpr, LIVE_D: gl.constexpr,
    LIVE_DV: gl.constexpr, TILE_N: gl.constexpr, PAGE_SIZE: gl.constexpr, NUM_CONSUMERS: gl.constexpr, SPLIT_Q: gl.constexpr,
    NUM_STAGES: gl.constexpr, REGISTERS: gl.constexpr, LOAD_REGISTERS: gl.constexpr, LOAD_WARPS: gl.constexpr,
    LOAD_FIRST: gl.constexpr, LAZY: gl.constexpr, MASK_FIRST: gl.constexpr, MASK_OTHERS: gl.constexpr, OWN_OUT: gl.constexpr,
    HALF_FIRST: gl.constexpr, CUT_LAST: gl.constexpr, HALF_LAST: gl.constexpr, BIAS: gl.constexpr, BOUNDED: gl.constexpr,
    GATHERED: gl.constexpr,
):  # fmt: skip
    """x_desc: TMA descriptors of arguments.py; of the rest, where that is apart (`HopperConfig`), else None. lse: pointer.
    counter: int32 (2,) of 0. BIAS: whether a product adds what ALiBi's bias of a key is. cap: of `scores.cap_of`, or None.
    BOUNDED: whether it is in base 2, and weights are relative to 0.

    table: of `schedule.plan_packed`, or None. In a packed call heads_per_group counts rows of keys. pages: `cache.Pages` of
    PAGE_SIZE tokens that have k and v, or None. GATHERED: whether tokens are copied one by one. lse_stride, lse_apart: see
    LseRows. REGISTERS, LOAD_REGISTERS: of a thread of consumers and of the LOAD_WARPS that load; LOAD_FIRST: whether these are
    the first warps, and get the registers that are left.
    """
    PACKED: gl.constexpr = table is not None
    if PACKED:
        num_tiles = gl.load(table)
    order = Order(num_tiles, num_heads, total_heads, heads_per_group, tail_heads)
    nothing = seqlen_q * 0
    lengths = Lengths(nothing, nothing, seqlen_q, seqlen_k)
    ring = _allocate(q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, out_desc, BLOCK_D, BLOCK_DV, LIVE_D, TILE_N,
                     NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, OWN_OUT, BIAS, GATHERED)  # fmt: skip
    rows = LseRows(lse, lse_stride, lse_apart)
    # The lists are written out: a tuple bound to a name loses what is constexpr in it.
    if NUM_CONSUMERS == 2:
        gl.warp_specialize([
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 0)),
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 1)),
            (_load, (q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, ring, counter, order, table, pages, lengths, window,
                     GROUP_SIZE, HEADS, LIVE_D, LIVE_DV, TILE_N, PAGE_SIZE, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES,
                     LOAD_WARPS)),
        ], [4, LOAD_WARPS], [REGISTERS, LOAD_REGISTERS])  # fmt: skip
    elif NUM_CONSUMERS == 3 and LOAD_FIRST:
        gl.warp_specialize([
            (_load, (q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, ring, counter, order, table, pages, lengths, window,
                     GROUP_SIZE, HEADS, LIVE_D, LIVE_DV, TILE_N, PAGE_SIZE, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES,
                     LOAD_WARPS)),
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 0)),
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 1)),
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 2)),
        ], [4, 4, 4], [REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
    elif NUM_CONSUMERS == 3:
        gl.warp_specialize([
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 0)),
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 1)),
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 2)),
            (_load, (q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, ring, counter, order, table, pages, lengths, window,
                     GROUP_SIZE, HEADS, LIVE_D, LIVE_DV, TILE_N, PAGE_SIZE, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES,
                     LOAD_WARPS)),
        ], [4, 4, LOAD_WARPS], [REGISTERS, REGISTERS, LOAD_REGISTERS])  # fmt: skip
    elif LOAD_FIRST:
        gl.warp_specialize([
            (_load, (q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, ring, counter, order, table, pages, lengths, window,
                     GROUP_SIZE, HEADS, LIVE_D, LIVE_DV, TILE_N, PAGE_SIZE, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES,
                     LOAD_WARPS)),
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 0)),
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 1)),
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 2)),
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 3)),
        ], [4, 4, 4, 4], [REGISTERS, REGISTERS, REGISTERS, REGISTERS])  # fmt: skip
    else:
        gl.warp_specialize([
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 0)),
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 1)),
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 2)),
            (_compute, (out_desc, rows, ring, num_heads, lengths, window, score_params, cap, sinks, dropout, HEADS,
                        LIVE_D, LIVE_DV, TILE_N, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES, LAZY, MASK_FIRST, MASK_OTHERS,
                        OWN_OUT, HALF_FIRST, CUT_LAST, HALF_LAST, BIAS, BOUNDED, PACKED, 3)),
            (_load, (q_desc, q_rest_desc, k_desc, k_rest_desc, v_desc, ring, counter, order, table, pages, lengths, window,
                     GROUP_SIZE, HEADS, LIVE_D, LIVE_DV, TILE_N, PAGE_SIZE, GATHERED, NUM_CONSUMERS, SPLIT_Q, NUM_STAGES,
                     LOAD_WARPS)),
        ], [4, 4, 4, LOAD_WARPS], [REGISTERS, REGISTERS, REGISTERS, LOAD_REGISTERS])  # fmt: skip


def launch(problem, config, operands):
    """Run the kernel. config: HopperConfig. Returns out and lse as `flashtile.attention` describes them."""
    return bind_forward(attention_forward, problem, config)(operands)
