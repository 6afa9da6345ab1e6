// A primitive of MLX's graph that runs a kernel of the tests' host machine, in the place of MLX's CustomKernel.

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "mlx/allocator.h"
#include "mlx/array.h"
#include "mlx/backend/cpu/encoder.h"
#include "mlx/device.h"
#include "mlx/primitives.h"
#include "mlx/stream.h"
#include "mlx/utils.h"

namespace mx = mlx::core;

// The entry of a compiled kernel (host_machine.py): buffers and their bytes, blocks, lanes of a block, a seed. It returns
// what went wrong.
typedef const char* (*Entry)(void**, const uint64_t*, int, int, int, int, uint64_t);

// The host machine keeps its lanes in static memory.
static std::mutex one_at_a_time;
static long launches = 0;

// The plan knows primitives by the name of their class.
class CustomKernel : public mx::Primitive {
 public:
  CustomKernel(mx::Stream stream, Entry entry, std::vector<int> blocks, int threads, std::string kernel)
      : mx::Primitive(stream), entry_(entry), blocks_(blocks), threads_(threads), kernel_(kernel) {}

  void eval_cpu(const std::vector<mx::array>& inputs, std::vector<mx::array>& outputs) override {
    std::vector<void*> data;
    std::vector<uint64_t> sizes;
    auto& encoder = mx::cpu::get_command_encoder(stream());
    auto add = [&](const mx::array& buffer) {
      data.push_back(const_cast<char*>(buffer.data<char>()));
      sizes.push_back(buffer.nbytes());
    };
    for (auto& input : inputs) {
      if (!input.flags().row_contiguous) throw std::runtime_error(kernel_ + ": an input is not row contiguous");
      encoder.set_input_array(input);
      add(input);
    }
    for (auto& output : outputs) {
      output.set_data(mx::allocator::malloc(output.nbytes()));
      encoder.set_output_array(output);
      add(output);
    }
    encoder.dispatch([data, sizes, entry = entry_, blocks = blocks_, threads = threads_, kernel = kernel_]() mutable {
      std::lock_guard<std::mutex> lock(one_at_a_time);
      ++launches;
      const char* fault = entry(data.data(), sizes.data(), blocks[0], blocks[1], blocks[2], threads, 1);
      if (fault && fault[0]) {
        // MLX's thread has nobody to throw to.
        std::fprintf(stderr, "The host machine stopped in %s: %s\n", kernel.c_str(), fault);
        std::_Exit(70);
      }
    });
  }
  void eval_gpu(const std::vector<mx::array>&, std::vector<mx::array>&) override {
    throw std::runtime_error("the host machine is a CPU");
  }
  // MLX refuses gradients and vmap of a primitive with this name.
  const char* name() const override { return "CustomKernel"; }

 private:
  Entry entry_;
  std::vector<int> blocks_;
  int threads_;
  std::string kernel_;
};

extern "C" long launches_so_far() { return launches; }

// `inputs` and `outputs` are addresses of the C++ arrays inside Python's. The outputs, placeholders of the right shapes and
// dtypes, become the results of a launch. Returns an error, or an empty text.
extern "C" const char* attach(void** inputs, int input_count, void** outputs, int output_count, void* entry,
                              const int* blocks, int threads, const char* kernel) {
  static std::string error;
  try {
    std::vector<mx::array> given;
    std::vector<mx::Shape> shapes;
    std::vector<mx::Dtype> dtypes;
    for (int i = 0; i < input_count; ++i) given.push_back(*(mx::array*)inputs[i]);
    for (int i = 0; i < output_count; ++i) {
      shapes.push_back(((mx::array*)outputs[i])->shape());
      dtypes.push_back(((mx::array*)outputs[i])->dtype());
    }
    auto primitive = std::make_shared<CustomKernel>(
        mx::default_stream(mx::Device::cpu), (Entry)entry, std::vector<int>(blocks, blocks + 3), threads, kernel);
    auto made = mx::array::make_arrays(std::move(shapes), dtypes, primitive, given);
    for (int i = 0; i < output_count; ++i) *(mx::array*)outputs[i] = made[i];
    return "";
  } catch (const std::exception& problem) {
    error = problem.what();
    return error.c_str();
  }
}
