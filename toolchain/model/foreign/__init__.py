"""Checkpoints that are quantized already: what their tensors mean, and the numbers they stand for.

Every layout stores a matrix as codes on a grid of scales and zero points, and means

    W[o, i] = (code[o, i] - zero[o, g(i)]) * scale[o, g(i)]          g(i): the group of input i

They differ in how codes lie and where zero is (`scheme` reads which one it is from the config):

    gptq     qweight int32 [I b/32, O], codes of b bits along inputs; qzeros [G, O b/32] along outputs; scales [G, O];
             g_idx [I]. Zero points are stored less one (checkpoint_format gptq), or as they are (gptq_v2).
    awq      qweight int32 [I, O/8] along outputs, columns 0 2 4 6 1 3 5 7 of each eight; qzeros and scales alike
    packed   weight_packed int32 [O, I b/32] along inputs, code + 2^(b-1); weight_scale [O, G]; weight_shape;
             weight_zero_point packed along outputs, weight_g_idx [I]
    plain    weight int8 or E4M3 [O, I]; weight_scale of the tensor, of each channel, or of each group

`packing` turns words into codes, `coded` one module's tensors into a matrix, `stored` a checkpoint's grids into the
scales that a quantized artifact can be made with. A matrix is dequantized in float32, where a product of an 8-bit
code and a float16 or bfloat16 scale is exact, whatever precision a kernel of the checkpoint's own library uses.

Sources: AutoGPTQ and GPTQModel (qlinear modules, v1 and v2), AutoAWQ (GEMM packing), compressed-tensors
(pack_quantized, naive_quantized), TensorRT Model Optimizer (unified Hugging Face checkpoint).

Legend: O outputs, I inputs, G groups, J words.
"""
