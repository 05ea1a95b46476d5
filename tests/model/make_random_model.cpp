// SPDX-License-Identifier: Apache-2.0
// make_random_model FOLDER smallest|tiny|large [SEED]: a model folder with random weights, for the tests of the
// program and for timing before a trained model is at hand.
#include <stdio.h>
#include <stdlib.h>

#include "model_files.hpp"

int main(int argc, char **argv) {
  const std::string size = argc > 2 ? argv[2] : "";
  if (argc < 3 || argc > 4 || (size != "smallest" && size != "tiny" && size != "large")) {
    fprintf(stderr, "usage: make_random_model FOLDER smallest|tiny|large [SEED]\n");
    return 2;
  }
  const model_files::Shape shape = size == "large"  ? model_files::Shape::large()
                                   : size == "tiny" ? model_files::Shape()
                                                    : model_files::Shape::smallest();
  const uint64_t seed = argc > 3 ? strtoull(argv[3], nullptr, 10) : 1;
  model_files::write_model(argv[1], shape, model_files::random_tensors(shape, seed));
  return 0;
}
