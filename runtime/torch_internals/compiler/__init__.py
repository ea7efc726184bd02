"""Private names of torch's compiler: of dynamo, AOT autograd and inductor, and of its graphs and passes."""
